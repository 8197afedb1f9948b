"""Submissions that fail half-way, and what they leave. ssh and LSF are stand-ins; test_login.py has real programs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import call_fever, wait_for

SSH = """#!/bin/bash
# Runs the command as another user would, and goes on there if this end is killed.
echo $$ > {there}/ssh.pid
cat | setsid env -i HOME={there} PATH=/usr/bin:/bin bash -c "${{@: -1}}" | cat
"""
BSUB = """#!/bin/bash
cat > {there}/script
case "$(cat {there}/mood)" in
    refuses) echo "No such project. Job not submitted." >&2; exit 255 ;;
    cut) kill -- -$(cat {there}/ssh.pid); until [ -e {there}/go ]; do sleep 0.05; done ;;
esac
echo "Job <17> is submitted to queue <normal>."
"""
PROGRAMS = {"bsub": BSUB, "bjobs": "#!/bin/sh\necho PEND\n", "bkill": "#!/bin/sh\n"}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a login node; the current folder is the laptop's, with a site's file."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "bin").mkdir(parents=True)
    here.mkdir()
    for name, text in {"ssh": SSH, **PROGRAMS}.items():
        path = (here if name == "ssh" else there / "bin") / name
        path.write_text(text.format(there=there) if name in ("ssh", "bsub") else text)
        path.chmod(0o755)
    (there / ".profile").write_text(f"export PATH={there}/bin:$PATH\n")
    site = {"kind": "lsf", "time": "20m", "login": {"host": "kestrel", "python": sys.executable}}
    (here / "kestrel.yaml").write_text(yaml.safe_dump(site))
    monkeypatch.chdir(here)
    monkeypatch.setenv("FEVER_HOME", str(here / "home"))
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    (there / "mood").write_text("accepts")
    return there


def files(folder: Path) -> set[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in names if path.parts[0] not in ("bin", "home", ".cache", ".config")}


def train(*words: str) -> tuple[int, str]:
    done = call_fever("train", "CartPole-v1", "--on", "kestrel.yaml", "--name", "one", "--detach", *words)
    return done.returncode, done.stdout + done.stderr


def test_a_submission_that_is_refused_leaves_nothing(there: Path) -> None:
    (there / "mood").write_text("refuses")
    before = files(there), files(Path())
    code, printed = train()
    assert (code, printed.strip().splitlines()[-1]) == (
        2, "fever: kestrel: bsub refused the job: No such project. Job not submitted."
    )  # fmt: skip
    assert files(there) - {"ssh.pid", "script"} == before[0]
    assert files(Path()) == before[1]
    assert call_fever("jobs").stdout.startswith("there are no jobs")


def test_a_dry_run_prints_the_script_and_leaves_nothing(there: Path) -> None:
    before = files(there), files(Path())
    code, printed = train("--dry-run")
    assert code == 0, printed
    assert "#BSUB -W 20" in printed
    assert f"cd {there}/.fever/runs/kestrel-" in printed
    assert (files(there) - {"ssh.pid"}, files(Path())) == before


def test_a_job_whose_number_was_lost_on_the_way_is_found(there: Path) -> None:
    """The connection breaks while the scheduler takes the job."""
    (there / "mood").write_text("cut")
    code, printed = train()
    assert (code, "its connection broke" in printed) == (2, True), printed
    assert re.search(r"kestrel-1 +queued .*being submitted", call_fever("jobs").stdout)
    (there / "go").touch()
    job = Path(f"{next((there / '.fever' / 'runs').iterdir())}/one/job/job.json")
    wait_for(lambda: json.loads(job.read_text())["id"] == "17", "submission")
    assert re.search(r"kestrel-1 +queued", call_fever("jobs").stdout)
    assert json.loads(Path("runs/one/job/job.json").read_text())["id"] == "17"
    assert "belongs to kestrel-1" in train()[1]


def test_a_run_directory_that_was_changed_leads_nowhere(there: Path) -> None:
    """What to run where is taken from the user's own records: a run directory may be anybody's."""
    code, printed = train()
    assert code == 0, printed
    record = Path("runs/one/job/job.json")
    facts = json.loads(record.read_text())
    record.write_text(json.dumps({**facts, "remote_path": "/tmp/of/somebody/else"}))
    (there / "ssh.pid").unlink()
    assert "its job.json was changed" in call_fever("jobs").stdout
    assert "its job.json was changed" in call_fever("logs", "kestrel-1").stderr
    assert not (there / "ssh.pid").exists()
