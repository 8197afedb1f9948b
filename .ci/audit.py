"""`audit.py PIP_AUDIT FILE`: look up the versions in a constraints file in the database of known vulnerabilities.

Exit code 1 if there is one. If the database cannot be reached, a message says so and the exit code is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FIRST = 3  # packages that show whether the database answers
PARTS = 8  # asked at the same time: pip-audit asks for one package after the other
SECONDS = 30.0  # for the answer of all parts


def ask(program: str, lines: list[str], seconds: float) -> list[dict[str, Any]]:
    """What pip-audit says of the packages that the database has. It has none if it cannot be reached: pip-audit takes
    a mirror of PyPI without the database for one that does not know them."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        words = ["--disable-pip", "--no-deps", "--progress-spinner=off", "--format=json", "--timeout=5"]
        try:
            done = subprocess.run([program, "-r", file.name, *words], capture_output=True, text=True, timeout=seconds)
            return [row for row in json.loads(done.stdout)["dependencies"] if "skip_reason" not in row]
        except (subprocess.TimeoutExpired, ValueError):
            return []


def audit(program: str, constraints: Path, seconds: float = SECONDS) -> int:
    """Print what is known; returns the exit code."""
    lines = [line for line in constraints.read_text().splitlines() if "==" in line]
    if not ask(program, lines[:FIRST], seconds):
        print("audit: the vulnerability database cannot be reached: skipped")
        return 0
    parts = [part for start in range(PARTS) if (part := lines[start::PARTS])]
    with ThreadPoolExecutor(PARTS) as pool:
        known = [row for rows in pool.map(lambda part: ask(program, part, seconds), parts) for row in rows]
    bad = [(row, vulnerability) for row in known for vulnerability in row["vulns"]]
    for row, vulnerability in bad:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
        print(f"audit: {row['name']} {row['version']} has {vulnerability['id']}; it is fixed in {fixed}")
    if not bad:
        print(
            f"audit: nothing is known against {len(known)} packages; {len(lines) - len(known)} could not be looked up"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1], Path(sys.argv[2])))
