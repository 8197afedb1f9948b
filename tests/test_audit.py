"""The audit of dependencies in `make check`: with a stand-in of pip-audit, since its database is on the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

PACKAGES = "one==1.0\ntwo==2.0\nthree==3.0\n"
CLEAN = {"name": "one", "version": "1.0", "vulns": []}
WEAK = {"name": "two", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
SKIPPED = {"name": "three", "skip_reason": "Dependency not found on PyPI and could not be audited"}


def audit(folder: Path, shell: str) -> tuple[int, str]:
    program, constraints = folder / "pip-audit", folder / "constraints.txt"
    program.write_text(f"#!/bin/sh\n{shell}\n")
    program.chmod(0o755)
    constraints.write_text(PACKAGES)
    command = [sys.executable, str(ROOT / ".ci" / "audit.py"), str(program), str(constraints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def answering(*rows: dict[str, object]) -> str:
    """A program that answers the package in its file with the row of this name."""
    cases = [f"*{row['name']}*) echo '{json.dumps({'dependencies': [row]})}';;" for row in rows]
    return f'case "$(cat "$2")" in {" ".join(cases)} esac'


def test_a_vulnerability_fails(tmp_path: Path) -> None:
    code, said = audit(tmp_path, answering(CLEAN, WEAK, SKIPPED))
    assert (code, said) == (1, "audit: two 2.0 has PYSEC-1; it is fixed in 2.1\n")


def test_no_vulnerability_passes(tmp_path: Path) -> None:
    code, said = audit(tmp_path, answering(CLEAN, {**WEAK, "vulns": []}, SKIPPED))
    assert (code, said) == (0, "audit: nothing is known against 2 packages; 1 could not be looked up\n")


def test_a_database_out_of_reach_is_said(tmp_path: Path) -> None:
    unknown = [{**SKIPPED, "name": name} for name in ("one", "two", "three")]  # a mirror without the database
    for shell in ("echo Traceback >&2; exit 1", "echo no JSON", answering(*unknown)):
        assert audit(tmp_path, shell) == (0, "audit: the vulnerability database cannot be reached: skipped\n")
