"""What the page says of metrics and settings is what the documentation and the algorithms say.

FEVER_GOLDEN=1 writes the files anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fever.algos.registry import ALGORITHMS, config_of
from fever.board.details import MEANINGS, SETTINGS, defaults_of
from tests.helpers import ROOT


def test_meanings_of_metrics_are_those_of_the_documentation() -> None:
    found: dict[str, dict[str, str]] = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            found.setdefault(cells[0].strip("`"), {"unit": cells[1], "meaning": cells[2].replace("`", "")})
    compare(MEANINGS, found)


def test_settings_are_those_of_the_algorithms() -> None:
    compare(SETTINGS, {name: defaults_of(config_of(name)) for name in ALGORITHMS})


def compare(path: Path, found: dict[str, Any]) -> None:
    if os.environ.get("FEVER_GOLDEN"):
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert json.loads(path.read_text()) == found
