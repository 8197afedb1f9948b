"""Searches for settings: many runs ("trials") on Ray Tune, each with other values, in one run directory.

    runs/NAME/
      config.yaml    the configuration, whose `search` part says what is searched
      trials/0007/   an ordinary run directory; trials/0007-seed-1/ for further seeds
      trials.jsonl   one row for every trial that is over: number, settings, score, state, error, ...
      best.yaml      the configuration of a run with the best settings: fever train -f runs/NAME/best.yaml
      search.png     scores by trial and by setting
      summary.json   how it ended
      log.txt        what libraries said
      tune/          Ray Tune's own state, for resuming; it contains pickles

What a score is: `fever/tune/score.py`. Nothing heavy is imported before a search begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fever.tune.space import is_space_expression

if TYPE_CHECKING:
    from fever.config import RunConfig
    from fever.envs.source import EnvSource
    from fever.runs.run import Run
    from fever.tune.table import SearchDisplay

__all__ = ["is_space_expression", "search"]


def search(
    config: RunConfig,
    source: EnvSource | None = None,
    display: SearchDisplay | None = None,
    run: Run | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Search for the best settings and return the summary; with `run`, go on with an interrupted search.

    A search that goes on reads Ray Tune's pickles, so it has to be trusted. Raises `FeverError` for input that cannot
    be used, then nothing is left on disk, and `TrainingError` if every trial fails, or Ray Tune itself.
    """
    from fever.tune.study import Study
    from fever.tune.table import QuietTable

    return Study(config, source, display or QuietTable(), run, trust).run()
