"""The lab itself: its machines are apart from each other and from this computer, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, wait_for
from tests.lab import machines as module
from tests.lab.machines import Lab, LabError, Machine, namespace, require_lab

pytestmark = pytest.mark.lab

OUTSIDE = "192.0.2.1"  # reserved for documentation, so nobody's
UNREACHABLE = {"OSError", "TimeoutError"}  # no route to the host, or not yet known that there is none
GREET = "import socket, sys; listener = socket.create_server((sys.argv[1], 7000)); print('up', flush=True)\n"
GREET += "while True: peer, _ = listener.accept(); peer.sendall(sys.argv[2].encode()); peer.close()"
CALL = "import socket, sys; peer = socket.create_connection((sys.argv[1], 7000), timeout=1); peer.settimeout(20)\n"
CALL += "print(peer.recv(99).decode())"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    require_lab()
    with Lab(tmp_path / "lab") as lab:
        yield lab


def greet(machine: Machine, text: str) -> None:
    """Have the machine say a text to whoever connects to it."""
    command = [sys.executable, "-c", GREET, machine.address, text]
    assert machine.popen(command, stdout=subprocess.PIPE, text=True).stdout.readline() == "up\n"


def call(machine: Machine, address: str) -> str:
    """What an address says to the machine, or the kind of error."""
    done = machine.run([sys.executable, "-c", CALL, address])
    return done.stdout.strip() or done.stderr.splitlines()[-1].split(":")[0]


def processes_in(networks: set[str]) -> list[int]:
    """The processes of this computer that are in one of these networks."""
    return [
        int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and namespace(int(entry), "net") in networks
    ]


def interfaces() -> str:
    """The network interfaces and the named namespaces of this computer."""
    return subprocess.run("ip -brief addr; ip netns", shell=True, capture_output=True, text=True, timeout=10).stdout


def networks_of(lab: Lab) -> set[str]:
    return {lab.switch.net, *(machine.net for machine in lab.everyone)}


def test_machines_have_names_and_addresses_of_their_own(lab: Lab) -> None:
    assert [machine.name for machine in lab.machines] == ["node1", "node2", "node3"]
    assert lab[1] is lab["node2"]
    assert lab["login"] is lab.login
    for machine in lab.everyone:
        shown = machine.run(["bash", "-c", f"hostname; getent hosts {machine.name}; ip -4 -o addr show eth0"]).stdout
        assert shown.splitlines()[0] == machine.name
        assert shown.count(machine.address) == 2
    assert len({machine.address for machine in lab.everyone}) == len(lab.everyone) == 5


def test_machines_reach_each_other_and_nothing_else(lab: Lab) -> None:
    greet(lab[1], "hello")
    assert [call(machine, "node2") for machine in lab.everyone] == ["hello"] * 5
    for machine in lab.everyone:
        assert call(machine, OUTSIDE) == "OSError"  # Network is unreachable
        assert machine.run(["ip", "-4", "route"]).stdout.split()[:3] == ["10.77.0.0/24", "dev", "eth0"]
        assert "default" not in machine.run(["bash", "-c", "ip route; ip -6 route"]).stdout
    assert "10.77.0." not in interfaces()


def test_places_of_their_own_and_shared_ones(lab: Lab, tmp_path: Path) -> None:
    for place in ("/dev/shm", "/run", "/tmp/ray"):
        lab[0].run(["touch", f"{place}/mine"], check=True)
        assert lab[0].run(["ls", place]).stdout.count("mine") == 1
        assert lab[1].run(["ls", place]).stdout.count("mine") == 0
        assert not Path(place, "mine").exists()
    lab[0].run(["touch", "ours"], cwd=tmp_path, check=True)
    assert "ours" in lab[1].run(["ls"], cwd=tmp_path).stdout


def test_processes_are_seen_in_their_own_machine_only(lab: Lab) -> None:
    started = lab[0].popen(["sleep", "1234"])
    (pid,) = wait_for(lambda: [pid for pid, line in lab[0].processes().items() if line == "sleep 1234"], "sleep")
    assert lab[0].run(["cat", f"/proc/{pid}/cmdline"]).stdout == "sleep\0001234\0"
    assert "1234" not in lab[1].run(["ps", "ax"]).stdout
    assert lab[1].processes() == {}
    assert lab.leftovers() == lab.leftovers("1234", "else") == [f"node1 {pid} sleep 1234"]
    assert lab.leftovers("else") == []
    started.terminate()
    assert started.wait(60) == -signal.SIGTERM
    wait_for(lambda: not lab.leftovers(), "end of it")


def test_environment_exit_code_and_folder_of_a_command(lab: Lab, tmp_path: Path) -> None:
    done = lab[0].run(["bash", "-c", "echo $A $PWD; exit 3"], env=lab.variables(A="1"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, f"1 {tmp_path}\n")
    with pytest.raises(subprocess.CalledProcessError):
        lab[0].run(["false"], check=True)


def test_a_timeout_ends_all_that_the_command_started(lab: Lab) -> None:
    other = lab[0].popen(["sleep", "1000"])
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as error:
        lab[0].run(["bash", "-c", "echo began; setsid sleep 2000 & env -i sleep 3000"], timeout=3)
    assert time.monotonic() - began < 60
    assert error.value.stdout == "began\n"
    assert lab.leftovers("2000") == []
    assert other.poll() is None


def test_a_crash_ends_one_machine(lab: Lab) -> None:
    greet(lab[0], "first")
    greet(lab[1], "second")
    lab[0].crash()
    assert lab[0].processes() == {}
    wait_for(lambda: not processes_in({lab[0].net}), "end of node1")
    with pytest.raises(LabError, match="node1 does not run"):
        lab[0].run(["true"])
    wait_for(lambda: call(lab[2], lab[0].address) in UNREACHABLE, "end of its network", 30)
    assert call(lab[2], lab[1].address) == "second"


def test_a_cable_can_be_pulled_and_put_back(lab: Lab) -> None:
    greet(lab[0], "hello")
    assert call(lab[1], lab[0].address) == "hello"
    lab[0].unplug()
    assert call(lab[1], lab[0].address) in UNREACHABLE
    assert len(lab[0].processes()) == 1
    lab[0].plug()
    wait_for(lambda: call(lab[1], lab[0].address) == "hello", "answer after the cable is back")


def test_ssh_reaches_every_machine_from_every_other(tmp_path: Path) -> None:
    require_lab("sshd", "ssh", "ssh-keygen")
    with Lab(tmp_path / "lab", machines=2) as lab:
        lab.start_ssh()
        for start, end in [(lab.login, lab[1]), (lab[0], lab[1]), (lab[1], lab.login)]:
            for name in (end.name, end.address):
                done = start.run(["ssh", "-F", lab.ssh_config, name, "hostname"], check=True)
                assert (done.stdout, done.stderr) == (f"{end.name}\n", "")
        assert lab.login.run(["ssh", "-F", lab.ssh_config, "server", "true"]).returncode == 255
        wait_for(lambda: not lab.leftovers(), "end of all sessions")


def test_mpirun_starts_ranks_on_all_hosts(tmp_path: Path) -> None:
    require_lab("sshd", "mpirun.openmpi", "mpirun.mpich")
    with Lab(tmp_path / "lab") as lab:
        lab.start_ssh()
        for start in (lab.mpirun_openmpi, lab.mpirun_mpich):
            done = lab.login.run([*start(6, lab.machines), "hostname"])
            assert Counter(done.stdout.split()) == {"node1": 2, "node2": 2, "node3": 2}, done.stderr
            done = lab.login.run([*start(3, lab.machines[1:]), "hostname"])
            assert Counter(done.stdout.split()) == {"node2": 2, "node3": 1}, done.stderr
        wait_for(lambda: not lab.leftovers(), "end of all ranks")


def test_slurm_runs_a_job_on_all_machines_soon(tmp_path: Path) -> None:
    require_lab("slurmctld", "slurmd", "sbatch", "munged")
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=1 --output=out.txt\nsrun hostname\necho done\n")
    with Lab(tmp_path / "lab") as lab:
        lab.start_slurm(KillWait=20)
        assert "KillWait                = 20 sec" in lab.login.run(["scontrol", "show", "config"]).stdout
        assert lab.login.run(["sinfo", "-h", "-o", "%P %D %T"]).stdout == "batch* 3 idle\nother 3 idle\n"
        assert lab.login.run(["sbatch", script], cwd=tmp_path).stdout == "Submitted batch job 1\n"
        wait_for(lambda: "COMPLETED" in lab.login.run(["scontrol", "-o", "show", "job", "1"]).stdout, "end of the job")
        assert sorted((tmp_path / "out.txt").read_text().split()) == ["done", "node1", "node2", "node3"]
        wait_for(lambda: not lab.leftovers(), "end of all tasks")


def test_a_daemon_that_does_not_come_up_is_explained(tmp_path: Path) -> None:
    require_lab("slurmctld", "slurmd", "sbatch", "munged")
    with Lab(tmp_path / "lab", machines=1) as lab, pytest.raises(LabError, match="NoSuchSetting"):
        lab.start_slurm(NoSuchSetting=1)


def test_two_labs_do_not_meet(lab: Lab, tmp_path: Path) -> None:
    with Lab(tmp_path / "other", machines=1) as other:
        greet(lab[0], "this lab")
        greet(other[0], "other lab")
        assert call(lab.login, "node1") == "this lab"
        assert call(other.login, "node1") == "other lab"
        assert call(other.login, lab[1].address) in UNREACHABLE
        assert not networks_of(lab) & networks_of(other)


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    require_lab("sshd")
    before = interfaces()
    with pytest.raises(ZeroDivisionError), Lab(tmp_path / "lab") as lab:  # noqa: PT012 - the lab is what is tested
        lab.start_ssh()
        started = lab[0].popen(["bash", "-c", "trap : TERM INT HUP; setsid sleep 1000 & setsid sleep 2000"])
        networks = networks_of(lab)
        assert len(processes_in(networks)) > 10
        raise ZeroDivisionError
    assert processes_in(networks) == []
    assert started.returncode == -signal.SIGKILL
    assert interfaces() == before


def test_nothing_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    require_lab("sshd")
    script = "import sys; from pathlib import Path; from tests.lab.machines import Lab\n"
    expression = "lab.switch.net, *(machine.net for machine in lab.everyone)"
    script += f"with Lab(Path('lab')) as lab: lab.start_ssh(); print({expression}, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as owner:
        networks = set(owner.stdout.readline().split())
        assert len(processes_in(networks)) > 10
        owner.kill()
    wait_for(lambda: not processes_in(networks), "end of the lab")


def test_why_there_is_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_no_namespaces", lambda: None)
    assert module.why_no_lab("bash") is None
    assert module.why_no_lab("bash", "nonesuch") == "this test needs nonesuch"
    monkeypatch.delenv("FEVER_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="nonesuch"):
        require_lab("nonesuch")
    monkeypatch.setenv("FEVER_REQUIRE", "1")
    with pytest.raises(pytest.fail.Exception, match="nonesuch"):
        require_lab("nonesuch")
