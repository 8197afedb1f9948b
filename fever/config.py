"""The configuration as frozen pydantic models; YAML files, the command line and Python all load into them.

Every field is made with `setting(default, meaning, source)`: one line that says what it is, in which unit, and where
its default comes from. `fever config ALGO` prints these lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fever.errors import FeverError
from fever.expressions import read_expression
from fever.text import brief, parse_count, parse_duration, shorten

Model = TypeVar("Model", bound=BaseModel)


def setting(default: Any, meaning: str, source: str = "", **constraints: Any) -> Any:
    """A documented field: its meaning with the unit, and the source of its default. `constraints` are pydantic's."""
    return Field(default, description=meaning, json_schema_extra={"source": source}, **constraints)


class Settings(BaseModel):
    """Base of all configuration: frozen, with unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `workers: yes`, which pydantic would take for 1."""
        numbers = _numbers_of(cls.model_fields[str(info.field_name)].annotation) if isinstance(value, bool) else set()
        if numbers:
            raise ValueError("must be a number" if float in numbers else "must be a whole number")
        return value


def _numbers_of(kind: Any) -> set[type]:
    """The kinds of numbers among the values of an annotation; none if truth values are among them."""
    kinds = [kind, *get_args(kind)]
    kinds += [part for one in kinds[1:] for part in get_args(one)]
    return set() if bool in kinds else {int, float}.intersection(kinds)


LONGEST_SECONDS = 1e9  # some 30 years; timers of the operating system end at 300
Duration = Annotated[  # seconds, as a number or as 10m
    float,
    BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value),
    Field(gt=0, le=LONGEST_SECONDS),
]
Count = Annotated[  # a number of steps, as a number or as 20k
    int, BeforeValidator(lambda value: parse_count(value) if isinstance(value, str) else value), Field(gt=0)
]
UNION_MEMBER = re.compile(  # the part that pydantic appends to the location of an error in a union
    r"(bool|int|float|str|literal|list|tuple|dict|constrained-\w+|function-\w+)(\[.*\])?"
)
MUST_BE = {  # type of a pydantic error -> what the value must be
    "greater_than": "greater than {gt:g}", "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}", "less_than_equal": "{le:g} or less", "literal_error": "{expected}",
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_parsing": "a number", "float_type": "a number", "finite_number": "a finite number",
    "bool_parsing": "true or false", "bool_type": "true or false", "string_type": "text",
    "dict_type": "a mapping", "model_type": "a mapping", "tuple_type": "a list",
}  # fmt: skip
COMMON_NAMES = {  # other libraries' name of a setting -> fever's; of several, the first that the algorithm has
    "lr": "learning_rate value_learning_rate", "discount": "gamma", "lam": "gae_lambda trace_decay",
    "n_steps": "steps", "num_steps": "steps", "rollout_fragment_length": "steps", "n_epochs": "epochs",
    "batch_size": "minibatch batch minibatches", "minibatch_size": "minibatch batch minibatches",
    "clip_range": "clip", "clip_param": "clip", "clip_coef": "clip", "vf_coef": "value_coefficient",
    "ent_coef": "entropy_coefficient temperature", "max_grad_norm": "max_gradient_norm", "net_arch": "hidden",
    "lambda_": "gae_lambda trace_decay", "num_epochs": "epochs", "entropy_coeff": "entropy_coefficient",
    "vf_loss_coeff": "value_coefficient", "vf_clip_param": "value_clip", "clip_range_vf": "value_clip",
    "target_network_update_freq": "target_updates", "target_update_interval": "target_updates",
    "n_quantiles": "quantiles", "n_sampled_goal": "her", "goal_selection_strategy": "her_strategy",
    "replay_buffer_class": "her", "rms_prop_eps": "optimizer_kwargs", "use_rms_prop": "optimizer",
    "grad_clip": "max_gradient_norm", "buffer_size": "buffer", "learning_starts": "warmup", "tau": "polyak",
    "n_critics": "critics", "top_quantiles_to_drop_per_net": "drop_quantiles",
    "action_noise": "exploration_noise", "target_policy_noise": "target_noise", "policy_noise": "target_noise",
    "noise_clip": "target_noise_clip", "policy_frequency": "policy_delay", "policy_freq": "policy_delay",
    "n_envs": "--envs", "num_envs": "--envs", "num_workers": "--workers", "total_timesteps": "--stop-steps",
}  # fmt: skip
LIBRARIES = ("rllib",)  # prefixes of other libraries' algorithms, which names of run directories keep
OPTIONS = {  # field of RunConfig -> its option, where it is called differently
    "callbacks": "--callback", "loggers": "--log", "start_from": "--from", "checkpoint_seconds": "--checkpoint-every",
    "stop": "--stop-steps", "search": "fever tune",
}  # fmt: skip
LONGEST_YAML = 10_000_000  # bytes
MOST_ENVS, MOST_WORKERS = 100_000, 10_000  # of a run, on all machines together
MOST_CORES = 10_000  # of one worker
MOST_EPISODES = 10_000  # of an evaluation, which is one row with all their returns
MOST_WINDOW = 1_000_000  # episodes that a mean return is taken over, which are kept in memory
WIDEST = 65_536  # units of a hidden layer
DEFAULT_ENVS = 8  # of a run
DEFAULT_STEPS = 1_000_000  # environment steps, for a run without any stop rule


class Stop(Settings):
    """When a run ends: at the first rule that is met. Without any rule it ends at the environment's registered reward
    threshold or after a million steps."""

    reward: float | None = setting(
        None, "mean return over the last `window` episodes; with eval_every, of the latest evaluation"
    )
    steps: Count | None = setting(None, "environment steps, all workers together, as 200000, 200k or 1M")
    seconds: Duration | None = setting(None, "wall time in seconds, or with a unit: 90s, 10m, 2h")
    iterations: int | None = setting(None, "training iterations", gt=0)
    window: int = setting(20, "number of episodes that the mean return is taken over", gt=0, le=MOST_WINDOW)

    @model_validator(mode="before")
    @classmethod
    def _time_is_seconds(cls, values: Any) -> Any:
        if isinstance(values, dict) and "time" in values:
            values = {**values, "seconds": values["time"]}
            del values["time"]
        return values

    def or_default(self, reward_threshold: float | None, steps: int = DEFAULT_STEPS) -> Stop:
        """These rules, or the default ones if there are none, which end the run after `steps` steps at the latest."""
        if any(rule is not None for rule in (self.reward, self.steps, self.seconds, self.iterations)):
            return self
        return self.model_copy(update={"reward": reward_threshold, "steps": steps})


class NetworkSettings(Settings):
    """Settings of the network, which all algorithms have."""

    default_widths: ClassVar[tuple[int, ...]] = (64, 64)
    hidden: tuple[int, ...] | None = setting(
        None, "widths of each head's hidden layers; null: 64,64, or none after convolutions",
        "Schulman et al. 2017, table 3",
    )  # fmt: skip
    activation: Literal["tanh", "relu"] = setting(
        "tanh", "activation function of the heads' hidden layers", "Schulman et al. 2017"
    )
    convolutions: tuple[tuple[int, int, int], ...] | None = setting(
        None, "[filters, kernel, stride] of each convolution, kernel a multiple of stride; null: by image size",
        "Mnih et al. 2015 from 36 pixels up, Young & Tian 2019 (MinAtar) below",
    )  # fmt: skip
    convolution_features: int = setting(
        512, "units of the dense layer after the convolutions", "Mnih et al. 2015", gt=0
    )
    network: str | None = setting(
        None, "a network of your own, module:Name, in the place of all layers before the heads (docs/networks.md)"
    )
    network_kwargs: dict[str, Any] = setting({}, "arguments for it, for example {width: 64}")

    @field_validator("*", mode="before")
    @classmethod
    def _split_commas(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept `hidden=64,64` and `hidden=64` for tuples."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if not isinstance(value, str | int) or not any(get_origin(one) is tuple for one in (kind, *get_args(kind))):
            return value
        return str(value).split(",")

    @field_validator("network", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Accept the class or function itself, from Python."""
        if callable(value):
            value = f"{value.__module__}:{value.__qualname__}"
        if isinstance(value, str) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise ValueError("write it as module:Name, a class or function that can be imported")
        return value

    @field_validator("hidden")
    @classmethod
    def _positive(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not all(1 <= width <= WIDEST for width in value):
            raise ValueError(f"every width must be from 1 to {WIDEST:,}")
        return value

    def widths(self, image: bool) -> tuple[int, ...]:
        """The hidden layers' widths, or the default ones if they are not set."""
        if self.hidden is not None:
            return self.hidden
        return () if image or self.network is not None else self.default_widths

    def widest(self, image: bool) -> int:
        """Units of the widest layer that is learned; with `rows`, it decides how many threads the learner uses."""
        return max(self.widths(image), default=0)

    def rows(self, envs: int) -> int:
        """Observations that the learner puts through its network at once, with this many environments in the run."""
        return 256


class Search(Settings):
    """A search for settings: many runs ("trials") on Ray Tune, each with different values."""

    space: dict[str, str] = setting(
        ..., "setting -> distribution of its values: uniform(a,b), loguniform(a,b), randint(a,b), choice(x,y,...)"
    )
    trials: int = setting(20, "number of trials; a grid has one for each of its points", gt=0)
    method: Literal["random", "grid", "optuna"] = setting(
        "random",
        "how values are proposed: at random; every combination of choices; by Optuna, which learns from trials",
    )
    scheduler: Literal["none", "asha", "pbt"] = setting(
        "none",
        "none: trials run to their stop rule; asha: bad ones end early; pbt: bad ones continue from good ones' copies",
    )
    seeds: int = setting(1, "runs of every trial, with consecutive seeds; the trial's score is their mean", gt=0)
    parallel: int | None = setting(None, "trials at the same time; null: as many as the cores allow", gt=0)

    @field_validator("space")
    @classmethod
    def _not_empty(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise ValueError("say what to search, for example learning_rate=loguniform(1e-5,1e-2)")
        return value


class RunConfig(Settings):
    """One run: environment, algorithm, workers, stop rules, and where its files go."""

    env: str = setting(..., 'environment: a Gymnasium id, "module:Id-v0", or "module:Name" of a class or factory')
    env_kwargs: dict[str, Any] = setting({}, "keyword arguments of the environment's constructor")
    algo: str = setting("ppo", 'algorithm; `fever config` lists them; or "module:Class" of one of your own')
    settings: dict[str, Any] = setting({}, "the algorithm's own settings; `fever config ALGO` lists them")
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)] | Literal["auto", "all", "ranks"] | None = setting(
        None, "sampler processes; 0: sample in this process, auto: measure and decide, all: one for every core, "
        "ranks: one for every rank of the job; null: 0, or RLlib's default",
    )  # fmt: skip
    cpus_per_worker: int | None = setting(
        None, "cores of its own for each worker, its threads and its child processes; null: one core, not bound to it",
        gt=0, le=MOST_CORES,
    )  # fmt: skip
    gpus_per_worker: float = setting(0.0, "share of a GPU for each worker's environments", ge=0)
    envs: int | None = setting(
        None,
        "environments of the whole run, which workers share, each at least one; null: 8, or RLlib's default",
        "rl-zoo, PPO CartPole-v1",
        gt=0,
        le=MOST_ENVS,
    )
    scale_batch: bool = setting(
        False, "every worker has `envs` environments, and batches, minibatches and the learning rate grow with the "
        "workers, for large pools: by W, W, and its square root (sgd: W)", "Malladi et al. 2022; Goyal et al. 2017",
    )  # fmt: skip
    starts_at_once: int = setting(
        64, "workers that make their environments at the same time, each one after the other; the others wait",
        gt=0,
    )  # fmt: skip
    preset: bool = setting(
        True, "settings, envs and stop.steps of the zoo for this environment and algorithm, under those that are set"
    )
    seed: int = setting(0, "the one seed that all others are derived from", ge=0)
    stop: Stop = setting(Stop(), "stop rules")
    device: Literal["auto", "cpu", "gpu"] = setting("auto", "where the learner runs; samplers never use a GPU")
    runs: str = setting("runs", "folder of run directories")
    name: str | None = setting(None, "name of the run directory; null: environment, algorithm and time")
    start_from: str | None = setting(
        None,
        "RUN or RUN:CHECKPOINT whose weights the run begins with; CHECKPOINT is last, best or an iteration's number",
    )
    checkpoint_seconds: Duration = setting(10.0, "seconds between checkpoints; the last one is written at the end")
    checkpoint_keep: int = setting(3, "number of latest checkpoints that are kept, besides the best", gt=0)
    max_env_failures: int = setting(
        100,
        "environments that fail are made anew; more than this many failures in an hour end the run; 0: the first does",
        ge=0,
    )
    step_timeout: Duration | None = setting(
        None, "time limit for one step() of an environment, in seconds or as 30s; beyond it, it has failed; null: none"
    )
    reset_timeout: Duration | None = setting(None, "time limit for one reset(), like step_timeout; null: none")
    callbacks: tuple[str, ...] = setting(
        (), 'callbacks of your own: "module:Name", or with arguments \'module:Name={"size": 3}\''
    )
    loggers: tuple[Literal["wandb", "mlflow"], ...] = setting((), "experiment trackers that the run is sent to")
    eval_every: Count | None = setting(
        None, "environment steps between two evaluations, as 20000, 20k or 1M; null: not evaluated"
    )
    eval_episodes: int = setting(10, "episodes of an evaluation", gt=0, le=MOST_EPISODES)
    eval_env_kwargs: dict[str, Any] = setting({}, "arguments of evaluation's environments that differ from env_kwargs")
    video_every: Count | None = setting(
        None, "environment steps between two videos of the policy, as 100000, 100k or 1M; null: no videos"
    )
    search: Search | None = setting(
        None, "null: one run; otherwise a search, whose trials are runs with this configuration"
    )

    @property
    def stem(self) -> str:
        """Environment and algorithm, which names of run directories begin with."""
        env = re.sub(r"[^\w.+-]+", "-", self.env.rpartition(":")[2]).strip("-").lower()
        first, *others = self.algo.lower().split(":")  # ppo, module:Class, rllib:PPO, or rllib:module:Class
        library = [first] if others and first in LIBRARIES else []
        return "-".join([env, *library, [first, *others][-1]])

    def texts(self) -> list[str]:
        """All texts in the settings, and in the values that a search gives them. Raises `FeverError` for a search whose
        expressions cannot be read."""
        space = self.search.space if self.search is not None else {}
        searched = [read_expression(name, text)[1] for name, text in space.items()]
        return texts_in([self.settings, searched])

    def names(self) -> list[str]:
        """The environment, callbacks, and settings that may name something of the user's, as `module:Name`. Raises
        `FeverError` as `texts` does."""
        callbacks = [word.partition("=")[0] for word in self.callbacks]
        return [self.env, *callbacks, *(text for text in self.texts() if ":" in text)]

    @field_validator("runs")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if not value or "\0" in value:
            raise ValueError("it is not a path")
        return value

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w][\w.+-]*", value):
            raise ValueError("a name consists of letters, digits, dots, dashes and underscores")
        return value


def texts_in(value: Any, keys: bool = False) -> list[str]:
    """All texts in a nested value, with `keys` also the names in mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        parts: Iterable[Any] = (*value, *value.values()) if keys else value.values()
    else:
        parts = value if isinstance(value, list | tuple | set | frozenset) else ()
    return [text for part in parts for text in texts_in(part, keys)]


def validate(model: type[Model], values: dict[str, Any], what: str, typed: Mapping[str, str] | None = None) -> Model:
    """Build a model from plain values; the first mistake becomes one sentence. `what` names the source of the values in
    it; `typed` has the words of the command line that set a field: `{"stop.seconds": "--stop-time 1m"}`.

    Unknown names are reported first: a misspelt name also makes its field look missing.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistakes = [(_field(one), one) for one in error.errors()]
        name, first = min(mistakes, key=lambda mistake: mistake[1]["type"] != "extra_forbidden")
        if first["type"] == "extra_forbidden":
            sentence = _unknown(model, name, what)
        elif first["type"] == "missing":
            sentence = f"{what} needs a value for {name}"
        else:
            words = shorten((typed or {}).get(re.sub(r"\.\d+$", "", name), ""), 1000)
            words = words or f"{what}: {name}={brief(first['input'])} cannot be used"
            sentence = f"{words}: {_reason([one for field, one in mistakes if field == name])}"
        raise FeverError(sentence) from None


def _field(error: Any) -> str:
    """The field that an error is about, as `stop.seconds`."""
    parts = [shorten(str(part)) for part in error["loc"]]
    named = {0, len(parts) - 1 if error["type"] in ("extra_forbidden", "missing") else 0}  # these are names for sure
    return ".".join(part for place, part in enumerate(parts) if place in named or not UNION_MEMBER.fullmatch(part))


def _reason(errors: list[Any]) -> str:
    """Why a value is refused: `must be 0 or more, auto or all` for the members of a union, or a validator's words."""
    if all(error["type"] in MUST_BE for error in errors):
        kinds = (MUST_BE[error["type"]].format(**error.get("ctx", {})) for error in errors)
        return f"must be {', '.join(dict.fromkeys(kinds))}".replace("'", "")
    message = shorten(errors[0]["msg"].removeprefix("Value error, "), 1000)
    return message[0].lower() + message[1:]


def _unknown(model: type[BaseModel], name: str, what: str) -> str:
    """The sentence about a name that a model does not have: the likely one, and all others."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in model.model_fields:  # the unknown name itself may have dots
        kind = model.model_fields[parts.pop(0)].annotation
        kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        model = kinds[0] if kinds else model
    last, names = ".".join(parts), list(model.model_fields)
    likely = [one for one in COMMON_NAMES.get(last, "").split() if one in names or one.startswith("--")]
    likely += difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if issubclass(model, NetworkSettings) and last in RunConfig.model_fields:  # seed=3
        likely = [OPTIONS.get(last, f"--{last.replace('_', '-')}")]
    hint = f"did you mean {likely[0]}? It" if likely else "it"
    close = difflib.get_close_matches(last, names, n=len(names), cutoff=0.0)
    return f"{what} has no setting {name}; {hint} has: {', '.join(close)}"


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """`["learning_rate=1e-3", "hidden=[64, 64]"]` to a dictionary; values are read as YAML."""
    from fever.plain_yaml import NotYaml, read

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals and text):
            raise FeverError(f"{shorten(pair)} is not a setting with a value; write settings as name=value")
        try:
            values[name.strip()] = read(text)
        except NotYaml as error:
            raise FeverError(f"the value of {shorten(name)} cannot be read: {brief(text)}") from error
    return values


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping."""
    from fever.plain_yaml import read

    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > LONGEST_YAML):
            raise FeverError(f"{path} cannot be read: it is not a file, or not one of settings: too large")
        values = read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FeverError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not YAML, not UTF-8, or no path at all
        number = getattr(error, "line", None)
        line = f" (line {number})" if number else ""
        raise FeverError(f"{path} is not YAML{line}: {shorten(str(error), 200)}") from error
    if not isinstance(values, dict):
        raise FeverError(f"{path} must hold a mapping such as `env: CartPole-v1`")
    return values
