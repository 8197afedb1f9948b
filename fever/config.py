"""The whole configuration as frozen models: what YAML files, the command line and Python all load into.

Every field is made with `setting(default, meaning, source)`: one line that says what it is, in which unit, and where
its default comes from. `fever config ALGO` prints exactly these lines.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from fever.errors import FeverError
from fever.text import parse_duration

Model = TypeVar("Model", bound=BaseModel)


def setting(default: Any, meaning: str, source: str = "", **constraints: Any) -> Any:
    """A documented field: its meaning with the unit, and the source of its default."""
    return Field(default, description=meaning, json_schema_extra={"source": source}, **constraints)


class Settings(BaseModel):
    """Base of all configuration: frozen, refuses names that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Duration = Annotated[  # seconds, as a number or as 10m
    float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value), Field(gt=0)
]
UNION_MEMBER = re.compile(  # what pydantic adds to the place of an error in a union
    r"(bool|int|float|str|literal|list|tuple|dict|constrained-\w+|function-\w+)(\[.*\])?"
)
DEFAULT_ENVS = 8  # environments per worker
DEFAULT_STEPS = 1_000_000  # environment steps, for a run without any stop rule


class Stop(Settings):
    """When a run ends: the first rule that is met. With no rule at all, the environment's registered reward threshold
    and a million steps."""

    reward: float | None = setting(None, "mean return over the last `window` episodes")
    steps: int | None = setting(None, "environment steps, all workers together", gt=0)
    seconds: Duration | None = setting(None, "wall time in seconds; 90, 90s, 10m and 2h are understood")
    iterations: int | None = setting(None, "training iterations", gt=0)
    window: int = setting(20, "episodes that `reward` is the mean of", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _time_is_seconds(cls, values: Any) -> Any:
        if isinstance(values, dict) and "time" in values:
            values = {**values, "seconds": values["time"]}
            del values["time"]
        return values

    def or_default(self, reward_threshold: float | None) -> Stop:
        """These rules, or the default ones if there are none."""
        if any(rule is not None for rule in (self.reward, self.steps, self.seconds, self.iterations)):
            return self
        return self.model_copy(update={"reward": reward_threshold, "steps": DEFAULT_STEPS})


class NetworkSettings(Settings):
    """The network; shared by all algorithms."""

    default_widths: ClassVar[tuple[int, ...]] = (64, 64)
    hidden: tuple[int, ...] | None = setting(
        None, "widths of each head's hidden layers; null: 64,64, none behind convolutions",
        "Schulman et al. 2017, table 3",
    )  # fmt: skip
    activation: Literal["tanh", "relu"] = setting("tanh", "of the heads' hidden layers", "Schulman et al. 2017")
    convolutions: tuple[tuple[int, int, int], ...] | None = setting(
        None, "[filters, kernel, stride] of each layer for images, kernel a multiple of stride; null: by image size",
        "Mnih et al. 2015 from 36 pixels up, Young & Tian 2019 (MinAtar) below",
    )  # fmt: skip
    convolution_features: int = setting(
        512, "units of the dense layer behind the convolutions", "Mnih et al. 2015", gt=0
    )

    @field_validator("hidden")
    @classmethod
    def _positive(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and any(width < 1 for width in value):
            raise ValueError("every width must be at least 1")
        return value

    def widths(self, image: bool) -> tuple[int, ...]:
        """The hidden layers' widths, chosen if they are not set."""
        return self.hidden if self.hidden is not None else () if image else self.default_widths


class Search(Settings):
    """A search for settings: many runs ("trials") on Ray Tune, each with other values."""

    space: dict[str, str] = setting(
        ..., "setting -> where its values come from: uniform(a,b), loguniform(a,b), randint(a,b), choice(x,y,...)"
    )
    trials: int = setting(20, "trials; a grid has as many as it has points", gt=0)
    method: Literal["random", "grid", "optuna"] = setting(
        "random", "who proposes values: chance; every combination of choices in turn; Optuna, which learns from trials"
    )
    scheduler: Literal["none", "asha", "pbt"] = setting(
        "none",
        "none: trials run to their stop rule; asha: bad ones end early; pbt: bad ones go on from copies of good ones",
    )
    seeds: int = setting(1, "runs of every trial, with seeds that follow one another; their mean score counts", gt=0)
    parallel: int | None = setting(None, "trials at the same time; null: as many as there are cores for", gt=0)

    @field_validator("space")
    @classmethod
    def _not_empty(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise ValueError("say what to search, for example learning_rate=loguniform(1e-5,1e-2)")
        return value


class RunConfig(Settings):
    """One run: what to train on, with what, where, and until when."""

    env: str = setting(..., 'environment: a Gymnasium id, "module:Id-v0", or "module:Name" of a class or factory')
    env_kwargs: dict[str, Any] = setting({}, "arguments for the environment's constructor")
    algo: str = setting("ppo", "algorithm; `fever config` lists them")
    settings: dict[str, Any] = setting({}, "the algorithm's own settings; `fever config ALGO` lists them")
    workers: Annotated[int, Field(ge=0)] | Literal["auto", "all"] | None = setting(
        None, "sampler processes; 0: in this process, auto: measure and decide, all: one for every core in reach; "
        "null: 0, or what RLlib has",
    )  # fmt: skip
    gpus_per_worker: float = setting(0.0, "share of a GPU that every worker's environments use", ge=0)
    envs: int | None = setting(
        None, "environments per worker, stepped together; null: 8, or what RLlib has", "rl-zoo, PPO CartPole-v1", gt=0
    )
    seed: int = setting(0, "the one seed that all others are derived from", ge=0)
    stop: Stop = setting(Stop(), "stop rules")
    device: Literal["auto", "cpu", "gpu"] = setting("auto", "where the learner runs; samplers never use a GPU")
    runs: str = setting("runs", "folder of run directories")
    name: str | None = setting(None, "name of the run directory; null: environment, algorithm and time")
    checkpoint_seconds: float = setting(10.0, "seconds between checkpoints; one more is written at the end", gt=0)
    checkpoint_keep: int = setting(3, "latest checkpoints kept, besides the best", gt=0)
    search: Search | None = setting(
        None, "null: one run; otherwise a search, whose trials are runs of this configuration"
    )

    @property
    def stem(self) -> str:
        """What the names of such runs begin with."""
        env = re.sub(r"[^\w.+-]+", "-", self.env.rpartition(":")[2]).strip("-").lower()
        parts = self.algo.lower().split(":")  # rllib:PPO, or rllib:module:Name
        return "-".join([env, *dict.fromkeys((parts[0], parts[-1]))])

    def names(self) -> list[str]:
        """The environment, and settings that may name something of the user's, as `module:Name`."""
        texts = [text for value in self.settings.values() for text in _texts(value)]
        return [self.env, *(text for text in texts if ":" in text)]

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w][\w.+-]*", value):
            raise ValueError("a name has letters, digits, dots, dashes and underscores only")
        return value


def _texts(value: Any) -> list[str]:
    """All texts in a nested value."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def validate(model: type[Model], values: dict[str, Any], what: str) -> Model:
    """Build a model from plain values; the first thing that is wrong becomes one sentence. A name that it does not have
    comes before all else, which may be missing because of it."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise FeverError(_sentence(model, first, what)) from None


def _sentence(model: type[BaseModel], error: Any, what: str) -> str:
    parts = [str(part) for part in error["loc"]]
    named = {0, len(parts) - 1 if error["type"] in ("extra_forbidden", "missing") else 0}  # places with a name for sure
    path = [part for place, part in enumerate(parts) if place in named or not UNION_MEMBER.fullmatch(part)]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        for part in path[:-1]:
            kind = model.model_fields[part].annotation
            kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
            model = kinds[0] if kinds else model
        names = list(model.model_fields)
        close = difflib.get_close_matches(path[-1], names, n=len(names), cutoff=0.0)
        likely = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {likely[0]}? It" if likely else "it"
        return f"{what} has no setting {name}; {hint} has: {', '.join(close)}"
    if error["type"] == "missing":
        return f"{what} needs a value for {name}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{what}: {name}={error['input']!r} cannot be used: {message}"


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """`["learning_rate=1e-3", "hidden=[64, 64]"]` to a dictionary; values are read as YAML."""
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise FeverError(f"{pair!r} is not a setting; settings are written as name=value")
        try:
            values[name.strip()] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: 2020-13-45, which looks like a date
            raise FeverError(f"the value of {name} cannot be read: {text!r}") from error
    return values


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise FeverError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8; 2020-13-45, which looks like a date
        first = str(error).splitlines()[0]
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place else ""
        raise FeverError(f"{path} is not YAML{line}: {first}") from error
    if not isinstance(values, dict):
        raise FeverError(f"{path} must hold a mapping such as `env: CartPole-v1`")
    return values
