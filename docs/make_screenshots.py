"""Make the pictures of the live page, the live display, a run's curves and a scaling report in docs/images:
docs/make_screenshots.py

Needs `pip install -e ".[dev]"` and a chromium. Takes about three minutes.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import fever
from fever.config import RunConfig
from fever.runs.plot import plot
from fever.training.display import LiveDisplay

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FEVER = (sys.executable, "-m", "fever")
MOST = 250_000  # bytes of a picture
DRAWN = "[...document.querySelectorAll('.chart-area')].every((area) => Number(area.dataset.points) > 0)"
TRAININGS = (
    "CartPole-v1 --name ppo --seeds 3 --stop-steps 40000 --eval-every 5k",
    "CartPole-v1 --name a2c --algo a2c --seeds 3 --stop-steps 40000",
    "CartPole-v1 --name two-workers --workers 2 --envs 8 --stop-steps 60000 --eval-every 5k --video-every 20k",
    "Acrobot-v1 --no-preset --name acrobot --stop-steps 20000",
)
SCALED = (  # an environment that waits, so that workers help on any machine
    "environments:Waiting", "--name", "scale", "--env-kwargs", '{"milliseconds": 5}', "--envs", "8", "steps=16",
    "--workers", "1,2,4", "--predict", "16,64", "--seconds", "5",
)  # fmt: skip
SEEDS = ",".join(f"{name}-seed-{seed}" for name in ("ppo", "a2c") for seed in range(3))
VIEWS = {  # picture -> fragment of its address, theme, height
    "board-list.png": ("#/runs", "light", 720),
    "board-run.png": ("#/run/two-workers?smooth=0.5", "light", 1150),
    "board-compare.png": (f"#/compare?band=1&runs={SEEDS}", "dark", 900),
    "board-scale.png": ("#/run/scale", "light", 1400),
}
SHOWN = "/home/you/lab"  # in place of the temporary folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a page that shows the runs in a folder."""
    command = [*FEVER, "board", "--runs", str(folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as board:
        try:
            yield next(found[0] for line in board.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            board.terminate()


def picture(page: Page, address: str, path: Path, folder: str) -> None:
    def rename(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace(folder, SHOWN))

    page.route(re.compile(r"/api/runs?(\?|$)"), rename)
    page.goto(address)
    page.locator("tr.row, .chart canvas, .medium img").first.wait_for()
    if page.locator("tr.group").count():
        page.locator("tr.group .name-button").last.click()
    page.wait_for_function(DRAWN, timeout=60_000)
    page.wait_for_timeout(2500)  # until the small curves of the list are drawn
    page.screenshot(path=path)
    assert path.stat().st_size < MOST, f"{path} has {path.stat().st_size} bytes"


class Snapshot(LiveDisplay):
    """Keeps a panel of the middle of a training."""

    def start(self, config: RunConfig, path: Path) -> None:
        self.config, self.path = config, Path("runs", path.name)

    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...
    def finish(self, summary: dict[str, Any]) -> None: ...

    def update(self, row: dict[str, Any]) -> None:
        super().update(row)
        if row.get("return_mean", 0.0) < 400:
            self.panel = self._panel(row)


def draw_display(folder: str) -> None:
    """The live display, and the curves of the run that it shows."""
    console = Console(record=True, width=78, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    display = Snapshot(console)
    trained = fever.train("CartPole-v1", runs=folder, name="cartpole-v1-ppo", stop={"reward": 475}, callbacks=[display])
    plot([trained.run], IMAGES / "curves.png")
    console.print(display.panel)
    local = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # no fonts from elsewhere
    console.save_svg(str(IMAGES / "live.svg"), title="fever train CartPole-v1", code_format=local)


def main() -> None:
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        draw_display(folder)
        for words in TRAININGS:
            subprocess.run([*FEVER, "train", *words.split()], cwd=folder, check=True)
        benchmarks = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "benchmarks")])
        environment = {**os.environ, "PYTHONPATH": benchmarks}
        subprocess.run([*FEVER, "scale", *SCALED], cwd=folder, env=environment, check=True)
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        with serving(Path(folder) / "runs") as address:
            for name, (fragment, theme, height) in VIEWS.items():
                size = {"width": 1280, "height": height}
                context = browser.new_context(viewport=size, color_scheme=theme, bypass_csp=True)
                picture(context.new_page(), address + fragment, IMAGES / name, folder)
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
