"""A cluster of fake machines on this one, made of Linux namespaces, for tests against the real programs.

Each machine has its own network, hostname, processes, /dev/shm, /run and /tmp/ray; the rest of the file system is
shared, as on a cluster with a shared home. All machines are connected to a switch, which is a namespace as well: this
computer has no interface in a lab, a lab has no route to the outside, and two labs cannot reach each other although
they use the same addresses. Namespaces end with their processes, and these with the test's process, even if it is
killed.

    with Lab(tmp_path) as lab:
        lab.start_slurm()
        lab.login.run(["srun", "--nodes=3", "hostname"]).stdout
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from fever.sampling.ray_settings import PRIVATE_SETTINGS

NEEDED = ("bash", "env", "ip", "mount", "nsenter", "setpriv", "unshare")
DAEMONS = {"munged", "slurmctld", "slurmd", "slurmstepd", "sshd"}  # of the lab itself; names as in /proc/PID/comm
MARK = "LAB_COMMAND"  # environment variable of all processes that one command has started in a machine
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])

# The first process of a machine: mounts the machine's own folders, then only reaps. $1: its name, $2: the hosts file,
# $3: its folder, the others: folders of the file system that the machine has for itself.
INIT = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
mkdir -p /run/lock /run/munge /run/slurm /run/sshd
for place in "${@:4}"; do mkdir -p "$place" "$3/private$place"; mount --bind "$3/private$place" "$place"; done
touch "$3/bashrc"
if [ -e ~root/.bashrc ]; then mount --bind "$3/bashrc" ~root/.bashrc; fi  # or ssh runs what this user has in it
exec 3<> <(:)
touch "$3/ready"
while :; do read -r -u 3; done
"""

SLURM = {
    "ClusterName": "lab",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "AuthInfo": "cred_expire=15",  # or a requeued job waits for two minutes
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "SlurmdTimeout": "10",
    "KillWait": "30",  # as by default
    "JobRequeue": "1",
    "SlurmdParameters": "config_overrides",
    "SchedulerParameters": "bf_interval=1,sched_interval=2,batch_sched_delay=0",
    "SlurmdSpoolDir": "/run/slurm",  # each machine's own, and short: there are sockets in it
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldPidFile": "/run/slurmctld.pid",
}

SSH_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/{name}_host
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
MaxStartups 100
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""

SSH_CLIENT = """
Host *
  User root
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  LogLevel ERROR
"""


class LabError(RuntimeError):
    """The lab could not do what was asked; the ends of the daemons' logs are in the message."""


def program(name: str) -> str | None:
    """The path of a program, including those for administrators that are not on the user's PATH."""
    return shutil.which(name, path=SEARCH)


@cache
def why_no_namespaces() -> str | None:
    """Why this computer cannot run fake machines; found out once by trying."""
    if os.geteuid() != 0:
        return "the lab needs root"
    if missing := [name for name in NEEDED if program(name) is None]:
        return f"the lab needs {', '.join(missing)}"
    attempt = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "switch", "type", "bridge"]
    tried = subprocess.run(attempt, capture_output=True, text=True, timeout=30, env={**os.environ, "PATH": SEARCH})
    return f"the lab needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


def why_no_lab(*programs: str) -> str | None:
    """The reason why a lab that needs these programs cannot run here; None if it can."""
    if reason := why_no_namespaces():
        return reason
    missing = [name for name in programs if program(name) is None]
    return f"this test needs {', '.join(missing)}" if missing else None


def require_lab(*programs: str) -> None:
    """Skip the test if no lab with these programs can run here; fail it if FEVER_REQUIRE is set."""
    if reason := why_no_lab(*programs):
        (pytest.fail if os.environ.get("FEVER_REQUIRE") else pytest.skip)(reason)


def wait_until(condition: Callable[[], Any], what: str, seconds: float, explain: Callable[[], str] = str) -> Any:
    """Poll until a condition holds and return its value; raises LabError with the explanation if it never does."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise LabError(f"no {what} within {seconds} s\n{explain()}".rstrip())
        time.sleep(0.01)
    return found


def check_output(command: Sequence[str | Path], **options: Any) -> str:
    """Run a short command of the lab itself and return its output; raises LabError with its messages if it fails."""
    environment = {**os.environ, "PATH": SEARCH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, **options)
    if done.returncode:
        raise LabError(f"{shlex.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def namespace(process: int, kind: str) -> str:
    """The identity of a process's namespace; empty if the process is gone."""
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")
    except OSError:
        return ""


def read_process(process: int, file: str) -> str:
    """A file of /proc about a process; empty if the process is gone."""
    try:
        return Path(f"/proc/{process}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def children(process: int) -> list[int]:
    """The children of a process's first thread."""
    return [int(word) for word in read_process(process, f"task/{process}/children").split()]


def parent(process: int) -> int:
    """The parent of a process; 0 if the process is gone."""
    rows = (line.split() for line in read_process(process, "status").splitlines())
    return next((int(row[1]) for row in rows if row[0] == "PPid:"), 0)


def kill(process: int, number: int, kind: str, identity: str) -> None:
    """Send a signal to a process if it is in a namespace; never to another process that reuses its number."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process)
        try:
            if namespace(process, kind) == identity:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def start_namespaces(*words: str, log: Any = None) -> tuple[subprocess.Popen[bytes], int]:
    """Start `unshare`; returns it and its child's process number. Both die with the thread that called this."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child=KILL", *words]
    environment = {**os.environ, "PATH": SEARCH}
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    with contextlib.suppress(LabError):
        return started, wait_until(lambda: children(started.pid), "namespaces", 60)[0]
    started.kill()
    raise LabError(f"{shlex.join(command)}: no namespaces, exit code {started.wait(10)}")


class Command(subprocess.Popen):
    """A command in a machine. Signals go to the command itself, not to the `nsenter` that started it."""

    def __init__(self, machine: Machine, mark: str, words: Sequence[str], **options: Any) -> None:
        self.machine, self.mark = machine, mark
        super().__init__(words, **options)
        wait_until(lambda: children(self.pid) or self.poll() is not None, f"process of {shlex.join(words)}", 60)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            for child in children(self.pid):
                kill(child, sig, "pid", self.machine.pids)

    def started(self) -> set[int]:
        """The running processes that the command has started, in any session; by their numbers outside the machine."""
        parents = {pid: parent(pid) for pid in self.machine.outer_processes()}
        found = {pid for pid in parents if parents[pid] == self.pid or self.mark in read_process(pid, "environ")}
        while more := {pid for pid in parents if parents[pid] in found} - found:
            found |= more
        return found

    def kill_all(self) -> None:
        """Kill the command and what it started in its machine."""

        def none_left() -> bool:
            for pid in (found := self.started()):
                kill(pid, signal.SIGKILL, "pid", self.machine.pids)
            return not found and self.poll() is not None

        wait_until(none_left, f"end of {shlex.join(self.args)}", 60)


class Switch:
    """The network of a lab: a bridge in a namespace of its own, with a cable to each machine."""

    def __init__(self, log: Path) -> None:
        with open(log, "w") as output:
            self.process, self.pid = start_namespaces("--net", "--", "sleep", "infinity", log=output)
        self.net = namespace(self.pid, "net")
        self.configure(self.pid, "link add switch type bridge", "link set switch up")

    def configure(self, process: int, *lines: str) -> None:
        """Run lines of `ip` in the network of a process."""
        check_output(["nsenter", "-t", str(process), "-n", "ip", "-batch", "-"], input="\n".join(lines))

    def connect(self, name: str, process: int, address: str) -> None:
        """A cable to the network of a process, which gets the address on eth0 and no route beyond."""
        peer = f"peer name eth0 netns {process}"
        self.configure(self.pid, f"link add {name} type veth {peer}", f"link set {name} master switch up")
        self.configure(process, "link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")

    def turn(self, name: str, state: str) -> None:
        """Turn the port of a cable "up" or "down"."""
        self.configure(self.pid, f"link set {name} {state}")

    def close(self) -> None:
        kill(self.pid, signal.SIGKILL, "net", self.net)
        self.process.wait(10)


class Machine:
    """One fake machine: an init process with its namespaces, and what runs in them."""

    def __init__(self, lab: Lab, name: str, address: str, private: Sequence[str]) -> None:
        self.lab, self.name, self.address = lab, name, address
        self.folder = lab.folder / name
        self.folder.mkdir()
        self.commands: list[Command] = []
        self.daemons: list[Command] = []
        init = ["--mount-proc", "--", "bash", "-c", INIT, "init", name, str(lab.hosts), str(self.folder), *private]
        with open(self.log("init"), "w") as log:
            self.process, self.pid = start_namespaces(*NAMESPACES, *init, log=log)
        self.net, self.pids = namespace(self.pid, "net"), namespace(self.pid, "pid")

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    def log(self, daemon: str) -> Path:
        """The log of one of the lab's daemons on this machine."""
        return self.folder / f"{daemon}.log"

    def wait_ready(self) -> None:
        """Wait until the first process has mounted the machine's own folders."""

        def ready() -> bool:
            return (self.folder / "ready").exists() or not self.alive()

        wait_until(ready, f"machine {self.name}", 60, self.lab.logs)
        if not self.alive():
            raise LabError(f"{self.name} did not start\n{self.lab.logs()}")

    def alive(self) -> bool:
        """Whether the machine runs, that is, whether the number of its first process still belongs to it."""
        return self.net == namespace(self.pid, "net") != ""

    def holds(self, process: int) -> bool:
        """Whether a process runs in this machine; `process`: its number outside."""
        return namespace(process, "pid") == self.pids

    def popen(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **options: Any,
    ) -> Command:
        """Start a command in the machine. `env`: all of its environment, if not that of this process and the lab's."""
        if not self.alive():
            raise LabError(f"{self.name} does not run")
        mark = f"{MARK}={uuid.uuid4().hex}"
        environment = dict(self.lab.variables() if env is None else env) | dict([mark.split("=")])
        enter = [str(program("nsenter")), "-t", str(self.pid), *NAMESPACES, "--", str(program("env"))]
        words = [*enter, f"--chdir={cwd or os.getcwd()}", *map(str, command)]
        options = {"stdin": subprocess.DEVNULL, **options}
        started = Command(self, mark, words, env=environment, **options)
        self.commands = [command for command in self.commands if command.poll() is None] + [started]
        return started

    def run(
        self,
        command: Sequence[str | Path],
        timeout: float = 300,
        check: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end, as `subprocess.run` does; after the timeout kill all it started."""
        started = self.popen(command, env, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with started:
            try:
                stdout, stderr = started.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                started.kill_all()
                stdout, stderr = started.communicate(timeout=60)
                raise subprocess.TimeoutExpired(list(command), timeout, stdout, stderr) from None
            except BaseException:
                started.kill_all()
                raise
        if check and started.returncode:
            raise subprocess.CalledProcessError(started.returncode, list(command), stdout, stderr)
        return subprocess.CompletedProcess(list(command), started.returncode, stdout, stderr)

    def outer_processes(self) -> Iterator[int]:
        """The processes of the machine but its init, by their numbers outside."""
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and self.holds(int(entry)) and int(entry) != self.pid:
                yield int(entry)

    def processes(self, daemons: bool = False) -> dict[int, str]:
        """The command lines of the machine's living processes by their numbers in it; without init and the lab's."""
        found = {}
        for pid in self.outer_processes():
            status = dict(line.split(":", 1) for line in read_process(pid, "status").splitlines())
            if not status or status["State"].split()[0] in "ZX":
                continue
            name = status["Name"].strip()
            if daemons or name not in DAEMONS:
                line = read_process(pid, "cmdline").replace("\0", " ").strip()
                found[int(status["NSpid"].split()[-1])] = line or f"[{name}]"
        return found

    def crash(self) -> None:
        """Kill all processes at once. The kernel still closes their connections: for a power cut `unplug` first."""
        kill(self.pid, signal.SIGKILL, "net", self.net)
        self.process.wait(10)

    def unplug(self) -> None:
        """Pull the cable: nothing comes in or goes out, and nobody is told."""
        self.lab.switch.turn(self.name, "down")

    def plug(self) -> None:
        """Put the cable back."""
        self.lab.switch.turn(self.name, "up")

    def listens(self, port: int) -> bool:
        """Whether a process of the machine accepts connections on a TCP port."""
        lines = [line for file in ("net/tcp", "net/tcp6") for line in read_process(self.pid, file).splitlines()[1:]]
        rows = [
            line.split() for line in lines
        ]  # 1: the address, all in hexadecimal digits; 3: the state, 0A for LISTEN
        return any(row[3] == "0A" and int(row[1].split(":")[1], 16) == port for row in rows)

    def succeeds(self, *command: str | Path) -> bool:
        """Whether a short command in the machine ends with exit code 0."""
        return self.run(command, timeout=20).returncode == 0

    def start_daemon(self, *command: str | Path) -> None:
        """Start one of the lab's own daemons, which stays in the foreground, with its output in its log."""
        with open(self.log(str(command[0])), "a") as log:
            words = [program(str(command[0])) or command[0], *command[1:]]
            self.daemons.append(self.popen(words, stdout=log, stderr=log))

    def close(self) -> None:
        self.crash()
        for command in self.commands:
            command.wait(10)


class Lab:
    """Compute machines "node1", "node2", ... on one network, with "login", where users type, and "server" for daemons.

    All files are in the folder. `environment` is what commands in the lab need beyond this process's variables;
    `everyone` are all machines, `machines` the compute machines.
    `private` names the folders that each machine has for itself. For a `with`, in a thread that outlives it.
    """

    def __init__(self, folder: Path, machines: int = 3, private: Sequence[str] = ("/tmp/ray",)) -> None:
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment: dict[str, str] = {}
        self.machines: list[Machine] = []
        self.everyone: list[Machine] = []
        self.addresses = {"server": "10.77.0.1", "login": "10.77.0.2"}
        self.addresses |= {f"node{index}": f"10.77.0.{10 + index}" for index in range(1, machines + 1)}
        self.hosts = self.folder / "hosts"
        lines = [("127.0.0.1", "localhost"), *((address, name) for name, address in self.addresses.items())]
        self.hosts.write_text("".join(f"{address} {name}\n" for address, name in lines))
        self.private = private
        self.ssh_folder = self.folder / "ssh"
        self.ssh_config = self.ssh_folder / "config"

    def __enter__(self) -> Lab:
        try:
            self.switch = Switch(self.folder / "switch.log")
            for name, address in self.addresses.items():
                self.everyone.append(Machine(self, name, address, self.private))
                self.switch.connect(name, self.everyone[-1].pid, address)
            for machine in self.everyone:
                machine.wait_ready()
        except BaseException:
            self.close()
            raise
        self.server, self.login, *self.machines = self.everyone
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getitem__(self, key: str | int) -> Machine:
        """A compute machine by its index, or any machine by its name."""
        if isinstance(key, int):
            return self.machines[key]
        return next(machine for machine in self.everyone if machine.name == key)

    def close(self) -> None:
        """End every process of the lab, and with them its namespaces."""
        with contextlib.ExitStack() as stack:  # goes on to the next although one raises
            if hasattr(self, "switch"):
                stack.callback(self.switch.close)
            for machine in self.everyone:
                stack.callback(machine.close)

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a command in the lab: that of this process without the settings of a Ray of its own, which
        trainings in other tests leave, the lab's, and more."""
        own = {name: value for name, value in os.environ.items() if name not in PRIVATE_SETTINGS}
        return {**own, **self.environment, **more}

    def logs(self, lines: int = 15) -> str:
        """The ends of the logs of all daemons."""
        parts = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*/*.log")]):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            if tail:
                parts.append("\n".join([f"--- {path.relative_to(self.folder)}", *tail]))
        return "\n".join(parts)

    def wait_for_daemons(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for what the lab's daemons bring about; a LabError with their logs if one has ended or it takes long."""

        def holds() -> bool:
            running = (machine for machine in self.everyone if machine.alive())
            for daemon in itertools.chain.from_iterable(machine.daemons for machine in running):
                if daemon.poll() is not None:
                    raise LabError(f"{shlex.join(daemon.args)}: exit code {daemon.returncode}\n{self.logs()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return bool(condition())
            return False

        wait_until(holds, what, 60, self.logs)

    def leftovers(self, *patterns: str) -> list[str]:
        """What runs on the compute machines beside the lab's daemons, as "node1 PID COMMAND LINE".

        With patterns, only what has one of these texts in its command line.
        """
        found = ((machine.name, pid, line) for machine in self.machines for pid, line in machine.processes().items())
        wanted = (row for row in found if not patterns or any(pattern in row[2] for pattern in patterns))
        return [f"{name} {pid} {line}" for name, pid, line in wanted]

    def give_homes(self, home: str) -> None:
        """Let who logs in to a compute machine be at home in a folder that the machine has for itself."""
        passwd = self.folder / "passwd"
        rows = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        places = {"root": home}
        passwd.write_text("".join(":".join([*row[:5], places.get(row[0], row[5]), row[6]]) + "\n" for row in rows))
        for machine in self.machines:
            machine.run(["sh", "-c", f"mkdir -p {home}; mount --bind {passwd} /etc/passwd"], check=True)

    def start_ssh(self) -> None:
        """One sshd on port 22 of login and each compute machine; `ssh -F lab.ssh_config node2` works in each."""
        self.ssh_folder.mkdir()
        reachable = [self.login, *self.machines]
        for name in ["user", *(f"{machine.name}_host" for machine in reachable)]:
            check_output(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.ssh_folder / name])
        known = []
        for machine in reachable:
            key = (self.ssh_folder / f"{machine.name}_host.pub").read_text()
            known.append(f"{machine.name},{machine.address} {key}")
            config = SSH_SERVER.format(folder=self.ssh_folder, name=machine.name, address=machine.address)
            (self.ssh_folder / f"{machine.name}.conf").write_text(config)
        (self.ssh_folder / "known_hosts").write_text("".join(known))
        self.ssh_config.write_text(SSH_CLIENT.format(folder=self.ssh_folder))
        client = self.ssh_folder / "ssh"  # for launchers that take a program but no words for it
        client.write_text(f'#!/bin/sh\nexec {program("ssh")} -F {self.ssh_config} "$@"\n')
        client.chmod(0o755)
        for machine in reachable:
            machine.start_daemon("sshd", "-D", "-e", "-f", self.ssh_folder / f"{machine.name}.conf")
        for machine in reachable:
            self.wait_for_daemons(partial(machine.listens, 22), f"sshd on {machine.name}")

    def start_slurm(self, **settings: Any) -> None:
        """Slurm with its controller on server and all compute machines idle; settings of slurm.conf override the lab's.

        Partitions: "batch", the default, and "other", both with all machines.
        """
        folder = self.folder / "slurm"
        folder.mkdir()
        self.start_munge(folder / "munge.key")
        config = folder / "slurm.conf"
        config.write_text(self.slurm_config(folder / "state", settings))
        self.environment["SLURM_CONF"] = str(config)
        self.server.start_daemon("slurmctld", "-D", "-f", config)
        for machine in self.machines:
            machine.start_daemon("slurmd", "-D", "-N", machine.name, "-f", config)

        def idle() -> bool:
            shown = self.login.run(["sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T"], timeout=20).stdout
            return sorted(shown.split("\n")) == sorted(["", *(f"{machine.name} idle" for machine in self.machines)])

        self.wait_for_daemons(partial(self.server.listens, 6817), "slurmctld")
        self.wait_for_daemons(idle, "Slurm with all machines idle")

    def slurm_config(self, state: Path, settings: Mapping[str, Any]) -> str:
        """The text of slurm.conf."""
        values = {**SLURM, "SlurmctldHost": f"server({self.server.address})", "StateSaveLocation": state, **settings}
        shape = "CPUs=2 CoresPerSocket=2 RealMemory=4000 State=UNKNOWN"
        lines = [f"{name}={value}" for name, value in values.items()]
        lines += [f"NodeName={machine.name} NodeAddr={machine.address} {shape}" for machine in self.machines]
        lines += ["PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
        lines += ["PartitionName=other Nodes=ALL MaxTime=INFINITE State=UP"]
        return "\n".join([*lines, ""])

    def start_munge(self, key: Path) -> None:
        """A munged with the same key on every machine, at the socket where clients look for it."""
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = [f"--key-file={key}", "--pid-file=/run/munge/pid", "--seed-file=/run/munge/seed"]
        for machine in self.everyone:
            words = ["--foreground", "--force", "--num-threads=1", f"--log-file={machine.log('munge')}", *places]
            machine.start_daemon("munged", *words)
        for machine in self.everyone:
            self.wait_for_daemons(partial(machine.succeeds, "munge", "-n"), f"munged on {machine.name}")

    def mpirun_openmpi(
        self, ranks: int, hosts: Sequence[Machine], export: Sequence[str] = ("PATH", "HOME")
    ) -> list[str]:
        """The words before a command that start it with OpenMPI as so many ranks, spread evenly, over ssh.

        `export` and the lab's environment name the variables that go with it; they must be set.
        """
        settings = {
            "plm_rsh_agent": f"ssh -F {self.ssh_config}",
            "btl_tcp_if_include": "eth0",
            "oob_tcp_if_include": "eth0",
            "orte_tmpdir_base": "/run",  # a machine's own; in /tmp two labs would meet
        }
        words = [["--mca", name, value] for name, value in settings.items()]
        words += [["-x", name] for name in dict.fromkeys([*export, *self.environment])]
        places = ["--host", spread(ranks, hosts), "-np", str(ranks)]
        return ["mpirun.openmpi", "--allow-run-as-root", *itertools.chain(*words), *places]

    def mpirun_mpich(self, ranks: int, hosts: Sequence[Machine]) -> list[str]:
        """The words before a command that start it with MPICH as so many ranks, spread evenly, over ssh.

        The whole environment goes with it.
        """
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self.ssh_folder / "ssh")]
        return ["mpirun.mpich", *launcher, "-iface", "eth0", "-hosts", spread(ranks, hosts), "-n", str(ranks)]


def spread(ranks: int, hosts: Sequence[Machine]) -> str:
    """So many ranks evenly on the hosts, as both kinds of mpirun want to read it: "node1:2,node2:1"."""
    share, rest = divmod(ranks, len(hosts))
    counts = [share + (index < rest) for index in range(len(hosts))]
    return ",".join(f"{host.name}:{count}" for host, count in zip(hosts, counts, strict=True) if count)
