"""The search space: what the expressions of a search stand for, and what Ray Tune makes of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fever.algos.registry import check_settings, find_provider
from fever.errors import FeverError
from fever.expressions import read_expression, refusal

if TYPE_CHECKING:
    from fever.config import RunConfig

BOUNDS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "lograndint": 2}  # function -> its arguments
INSIDE = 1e-9  # share of a range by which checked values lie inside it: a bound itself is hardly ever drawn


@dataclass(frozen=True)
class Dimension:
    """The values that one setting may take."""

    function: str  # one of BOUNDS, or choice
    low: float = 0.0
    high: float = 0.0  # with randint and lograndint the first number that is not drawn, as in Ray Tune
    step: float = 0.0  # of quniform
    values: tuple[Any, ...] = ()  # of choice

    @property
    def logarithmic(self) -> bool:
        return self.function in ("loguniform", "lograndint")

    @property
    def whole(self) -> bool:
        """Whether all its values are whole numbers."""
        numbers = (self.low, self.high, self.step)
        return self.function.endswith("randint") or (
            self.function == "quniform" and all(float(number).is_integer() for number in numbers)
        )

    @property
    def last(self) -> float:
        """The highest value."""
        return self.high - 1 if self.function.endswith("randint") else self.high

    def edges(self) -> list[Any]:
        """Values to check in place of all: every choice, or the two just inside the bounds."""
        if self.values:
            return list(self.values)
        if self.whole:
            return [int(self.low), int(self.last)]
        if self.function == "quniform":
            return [self.low, self.high]
        margin = INSIDE * (self.high - self.low)
        return [self.low + margin, self.high - margin]

    def domain(self, tune: Any) -> Any:
        """The same as a domain of Ray Tune's. Choices are JSON texts, which every searcher can tell apart."""
        if self.values:
            return tune.choice([json.dumps(value) for value in self.values])
        bounds = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        more = (self.step,) if self.function == "quniform" else ()
        return getattr(tune, self.function)(*bounds, *more)

    def nearest(self, value: Any) -> Any:
        """The value of this dimension that is nearest to `value`, which may lie outside."""
        if self.values:
            return value
        value = min(max(value, self.low), self.last)
        if self.step:
            value = round(value / self.step) * self.step
        return round(value) if self.whole else value

    def value(self, drawn: Any) -> Any:
        """The setting's value, as plain Python, for what Ray Tune has drawn."""
        if self.values:
            return json.loads(drawn)
        return round(drawn) if self.whole else float(drawn)


@dataclass(frozen=True)
class Space:
    """The settings that are searched, and the values that each may take."""

    dimensions: dict[str, Dimension]

    @property
    def points(self) -> int:
        """The number of combinations of choices."""
        return math.prod(len(dimension.values) for dimension in self.dimensions.values())

    @property
    def first(self) -> dict[str, Any]:
        """One value of every setting, to check the others or the resources of a trial with."""
        return {name: dimension.edges()[0] for name, dimension in self.dimensions.items()}

    def domains(self, tune: Any, grid: bool = False) -> dict[str, Any]:
        """The domains that Ray Tune draws from; with `grid`, the values that it enumerates."""
        if grid:
            texts = {name: [json.dumps(value) for value in one.values] for name, one in self.dimensions.items()}
            return {name: tune.grid_search(values) for name, values in texts.items()}
        return {name: dimension.domain(tune) for name, dimension in self.dimensions.items()}

    def mutations(self, tune: Any) -> dict[str, Any]:
        """How population-based training changes a setting: to a neighbour among choices, by a factor otherwise."""
        texts = {name: [json.dumps(value) for value in one.values] for name, one in self.dimensions.items()}
        return {name: texts[name] or one.domain(tune) for name, one in self.dimensions.items()}

    def within(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Values that population-based training has changed, moved back into the space."""
        moved = {name: one.nearest(drawn[name]) for name, one in self.dimensions.items()}
        return {**drawn, **moved}

    def settings(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """The algorithm's settings for what Ray Tune has drawn."""
        return {name: dimension.value(drawn[name]) for name, dimension in self.dimensions.items()}


def is_space_expression(text: str) -> bool:
    """Whether the value of `name=value` is an expression such as `loguniform(1e-5,1e-2)` and not a plain value.

    Everything that looks like a call is one, so that a misspelt function gets an error that lists the allowed ones.
    """
    return re.match(r"\s*[A-Za-z_]\w*\s*\(", text) is not None


def as_expression(values: Any) -> str:
    """An expression for the values of a setting in Python: text is one already, a list holds choices."""
    if isinstance(values, str):
        return values
    if not isinstance(values, list | tuple):
        raise FeverError(f'{values!r} cannot be searched: give a list of values, or text like "uniform(0,1)"')
    return f"choice({', '.join(map(repr, values))})"


def parse(space: dict[str, str]) -> Space:
    """Read all expressions; raises `FeverError` for the first that is wrong."""
    return Space({name: parse_dimension(name, text) for name, text in space.items()})


def parse_dimension(name: str, text: str) -> Dimension:
    """Read one expression."""
    function, values = read_expression(name, text)
    if function == "choice":
        if not values:
            raise refusal(name, text, "choice needs at least one value")
        return Dimension(function, values=tuple(values))
    if function not in BOUNDS:
        raise refusal(name, text, f"there is no {function}")
    _check_bounds(name, text, function, values)
    return Dimension(function, *values)


def _check_bounds(name: str, text: str, function: str, values: list[Any]) -> None:
    if len(values) != BOUNDS[function]:
        raise refusal(name, text, f"{function} takes {BOUNDS[function]} numbers")
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        raise refusal(name, text, f"{function} takes numbers")
    low, high = values[:2]
    if low >= high:
        raise refusal(name, text, "the first number must be the smaller one")
    if function.startswith("log") and low <= 0:
        raise refusal(name, text, f"{function} takes numbers above 0")
    if function.endswith("randint") and not all(float(value).is_integer() for value in values):
        raise refusal(name, text, f"{function} takes whole numbers")
    if function == "quniform" and not 0 < values[2] <= high - low:
        raise refusal(name, text, "the step must be above 0 and fit into the range")
    if function == "quniform" and not all(math.isclose(one / values[2], round(one / values[2])) for one in (low, high)):
        raise refusal(name, text, "the first two numbers must be multiples of the step")


def check_space(config: RunConfig, space: Space) -> None:
    """Raise `FeverError` for settings that the algorithm does not have, and for ranges with values that it refuses."""

    provider = find_provider(config.algo)
    for name, dimension in space.dimensions.items():
        field = provider.run_field(name) if provider is not None else None
        if field is not None:  # what a trial asks Ray for is settled before the first one begins
            option = field.replace("_", "-")
            raise FeverError(f"{name} cannot be searched: all trials have the same; give it as --{option}")
        for value in dimension.edges():
            check_settings(config.algo, {**config.settings, **space.first, name: value})
