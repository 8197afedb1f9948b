"""Measures the examples of docs/scaling.md on this machine, and writes them into that page:

    .venv/bin/python benchmarks/scaling.py            about ten minutes, on a machine that does nothing else
    .venv/bin/python benchmarks/scaling.py --quick    whether it works; the page stays as it is

An environment that waits, one that computes, and one that is too cheap for workers. The first is run with the number of
workers that was predicted as well.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- begin: written by benchmarks/scaling.py -->\n", "<!-- end -->\n"
WAITING = ["environments:Waiting", "--env-kwargs", '{"milliseconds": 5}', "--envs", "8", "steps=16"]
BUSY = ["environments:Busy", "--env-kwargs", '{"milliseconds": 2}', "--envs", "4", "steps=64"]


def scale(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Run one comparison; returns its report."""
    command = [sys.executable, "-m", "fever", "scale", *words, "--name", name, "--json"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def section(folder: Path, name: str, title: str, report: dict[str, Any]) -> list[str]:
    """The part of the page about one comparison: its answer, and its tables."""
    page = (folder / "runs" / name / "report.md").read_text()
    tables = [block for block in page.split("\n\n") if block.startswith("|")]
    return [f"**{title}** {report['answer']}. Bottleneck: {report['bottleneck']}.", *tables[:1]]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    length = ["--seconds", "2" if quick else "10", "--rounds", "1" if quick else "3"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        waiting = scale(folder, "waiting", *WAITING, "--workers", "1,2,4", "--predict", "8", *length)
        really = scale(folder, "really", *WAITING, "--workers", "1,8", *length)["counts"][-1]["samples_per_second"]
        busy = scale(folder, "busy", *BUSY, "--workers", "1,2,4", *length)
        cheap = scale(folder, "cheap", "CartPole-v1", "--workers", "0,1,2,4", *length)
        predicted = waiting["predicted"][0]["samples_per_second"]
        parts = [
            f"## Examples\n\nMeasured on {time.strftime('%Y-%m-%d')}, on a machine with {os.cpu_count()} cores.",
            *section(folder, "waiting", "An environment that waits 5 ms per step:", waiting),
            f"Eight workers were predicted to take {predicted:,.0f} samples/s. Then they were run: {really:,.0f}. "
            f"The prediction was {predicted / really - 1:+.1%} off.",
            "![speedup against linear, and where the time went](images/speedup.png)",
            *section(folder, "busy", "An environment that computes for 2 ms per step:", busy),
            *section(folder, "cheap", "CartPole-v1, whose steps take microseconds:", cheap),
        ]
        text = "\n\n".join(parts) + "\n"
        print(text)
        if not quick:
            page = (DOCS / "scaling.md").read_text()
            before, after = page.partition(BEGIN)[0], page.partition(END)[2]
            (DOCS / "scaling.md").write_text(f"{before}{BEGIN}{text}{END}{after}")
            shutil.copy(folder / "runs" / "waiting" / "speedup.png", DOCS / "images" / "speedup.png")


if __name__ == "__main__":
    main()
