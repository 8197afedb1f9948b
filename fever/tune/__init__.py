"""Searches for settings: many runs ("trials") on Ray Tune, each with other values, in one run directory.

    runs/NAME/
      config.yaml    the configuration, whose `search` part says what is searched
      trials/0007/   an ordinary run directory; trials/0007-seed-1/ for a further seed
      trials.jsonl   one row for every trial that has ended: number, settings, score, state, error, ...
      best.yaml      the configuration of a run with the best settings: fever train -f runs/NAME/best.yaml
      search.png     scores by trial and by setting
      summary.json   how the search ended
      log.txt        log records and libraries' warnings
      tune/          Ray Tune's own state, for resuming; it contains pickles

`fever/tune/score.py` defines the score. Nothing heavy is imported before a search begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fever.config import RunConfig
    from fever.envs.source import EnvSource
    from fever.runs.run import Run
    from fever.tune.table import SearchDisplay

__all__ = ["search"]


def search(
    config: RunConfig,
    source: EnvSource | None = None,
    display: SearchDisplay | None = None,
    run: Run | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Search for the best settings and return the summary; with `run`, continue an interrupted search.

    Continuing reads Ray Tune's pickles, so it needs `trust`. Raises `FeverError` for input that cannot be used, before
    anything is written, and `TrainingError` if every trial fails, or Ray Tune itself.
    """
    from fever.tune.study import Study
    from fever.tune.table import SearchDisplay

    return Study(config, source, display or SearchDisplay(), run, trust).run()
