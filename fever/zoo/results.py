"""What `make zoo` has measured for a row: `results/ROW.json`."""

from __future__ import annotations

from fever.config import Count, Settings, setting, validate
from fever.files import read_json
from fever.text import format_number
from fever.zoo import rows

FOLDER = rows.FOLDER / rows.RESULTS
Numbers = tuple[float, ...]


class Curve(Settings):
    """The mean learning curve over seeds, and the interval of the mean at each of its points."""

    steps: Numbers = setting(..., "environment steps [points]")
    mean: Numbers = setting(..., "mean return of training's last episodes [points]")
    low: Numbers | None = setting(None, "lower end of the 95% interval [points]; null: a single seed")
    high: Numbers | None = setting(None, "upper end")


class Result(Settings):
    """A row's result, over seeds."""

    row: str = setting(..., "name of the row")
    steps: Count = setting(..., "budget of each run, in environment steps")
    seeds: tuple[int, ...] = setting(..., "seeds of the runs")
    scores: Numbers = setting(..., "mean return of each run's last policy, over `episodes` episodes")
    episodes: int = setting(..., "episodes that each policy was evaluated with")
    mean: float = setting(..., "mean of `scores`")
    interval: tuple[float, float] | None = setting(None, "95% interval of that mean, by bootstrap over the seeds")
    seconds: float = setting(..., "median wall time of a run's training")
    cores: int = setting(..., "cores of the machine, which runs share by two")
    fever: str = setting(..., "version of fever")
    date: str = setting(..., "day of the measurement")
    command: str = setting(..., "what trained the first run")
    curve: Curve = setting(..., "learning curve")

    @property
    def words(self) -> str:
        """`231 (211 to 249)`"""
        around = f" ({' to '.join(map(format_number, self.interval))})" if self.interval else ""
        return f"{format_number(self.mean)}{around}"


def read_result(row: str) -> Result | None:
    """The result of a row; None if it is not measured yet."""
    path = FOLDER / f"{row}.json"
    return validate(Result, read_json(path), str(path)) if path.is_file() else None
