"""The configuration as frozen pydantic models; YAML files, the command line and Python all load into them.

Every field is made with `setting(default, meaning, source)`: one line that says what it is, in which unit, and where
its default comes from. `fever config ALGO` prints these lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
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
from fever.text import parse_count, parse_duration

Model = TypeVar("Model", bound=BaseModel)


def setting(default: Any, meaning: str, source: str = "", **constraints: Any) -> Any:
    """A documented field: its meaning with the unit, and the source of its default. `constraints` are pydantic's."""
    return Field(default, description=meaning, json_schema_extra={"source": source}, **constraints)


class Settings(BaseModel):
    """Base of all configuration: frozen, with unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Duration = Annotated[  # seconds, as a number or as 10m
    float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value), Field(gt=0)
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
DEFAULT_ENVS = 8  # environments per worker
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
    window: int = setting(20, "number of episodes that the mean return is taken over", gt=0)

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
        if value is not None and any(width < 1 for width in value):
            raise ValueError("every width must be at least 1")
        return value

    def widths(self, image: bool) -> tuple[int, ...]:
        """The hidden layers' widths, or the default ones if they are not set."""
        if self.hidden is not None:
            return self.hidden
        return () if image or self.network is not None else self.default_widths

    def widest(self, image: bool) -> int:
        """Units of the widest layer that is learned, which decides how many threads the learner uses on a CPU."""
        return max(self.widths(image), default=0)


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
    workers: Annotated[int, Field(ge=0)] | Literal["auto", "all"] | None = setting(
        None, "sampler processes; 0: sample in this process, auto: measure and decide, all: one for every core; "
        "null: 0, or RLlib's default",
    )  # fmt: skip
    gpus_per_worker: float = setting(0.0, "share of a GPU for each worker's environments", ge=0)
    envs: int | None = setting(
        None, "environments per worker, stepped together; null: 8, or RLlib's default", "rl-zoo, PPO CartPole-v1", gt=0
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
    callbacks: tuple[str, ...] = setting(
        (), 'callbacks of your own: "module:Name", or with arguments \'module:Name={"size": 3}\''
    )
    loggers: tuple[Literal["wandb", "mlflow"], ...] = setting((), "experiment trackers that the run is sent to")
    eval_every: Count | None = setting(
        None, "environment steps between two evaluations, as 20000, 20k or 1M; null: not evaluated"
    )
    eval_episodes: int = setting(10, "episodes of an evaluation", gt=0)
    eval_env_kwargs: dict[str, Any] = setting({}, "arguments of evaluation's environments that differ from env_kwargs")
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

    def names(self) -> list[str]:
        """The environment, callbacks, and settings that may name something of the user's, as `module:Name`."""
        texts = [text for value in self.settings.values() for text in _texts(value)]
        callbacks = [word.partition("=")[0] for word in self.callbacks]
        ranges = self.search.space.values() if self.search is not None else ()
        searched = [name for text in ranges for name in re.findall(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text)]
        return [self.env, *callbacks, *(text for text in texts if ":" in text), *searched]

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w][\w.+-]*", value):
            raise ValueError("a name consists of letters, digits, dots, dashes and underscores")
        return value


def _texts(value: Any) -> list[str]:
    """All texts in a nested value."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


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
            words = (typed or {}).get(
                re.sub(r"\.\d+$", "", name)
            ) or f"{what}: {name}={first['input']!r} cannot be used"
            sentence = f"{words}: {_reason([one for field, one in mistakes if field == name])}"
        raise FeverError(sentence) from None


def _field(error: Any) -> str:
    """The field that an error is about, as `stop.seconds`."""
    parts = [str(part) for part in error["loc"]]
    named = {0, len(parts) - 1 if error["type"] in ("extra_forbidden", "missing") else 0}  # these are names for sure
    return ".".join(part for place, part in enumerate(parts) if place in named or not UNION_MEMBER.fullmatch(part))


def _reason(errors: list[Any]) -> str:
    """Why a value is refused: `must be 0 or more, auto or all` for the members of a union, or a validator's words."""
    if all(error["type"] in MUST_BE for error in errors):
        kinds = (MUST_BE[error["type"]].format(**error.get("ctx", {})) for error in errors)
        return f"must be {', '.join(dict.fromkeys(kinds))}".replace("'", "")
    message = errors[0]["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _unknown(model: type[BaseModel], name: str, what: str) -> str:
    """The sentence about a name that a model does not have: the likely one, and all others."""
    *parents, last = name.split(".")
    for part in parents:
        kind = model.model_fields[part].annotation
        kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        model = kinds[0] if kinds else model
    names = list(model.model_fields)
    likely = [one for one in COMMON_NAMES.get(last, "").split() if one in names or one.startswith("--")]
    likely += difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if issubclass(model, NetworkSettings) and last in RunConfig.model_fields:  # seed=3
        likely = [OPTIONS.get(last, f"--{last.replace('_', '-')}")]
    hint = f"did you mean {likely[0]}? It" if likely else "it"
    close = difflib.get_close_matches(last, names, n=len(names), cutoff=0.0)
    return f"{what} has no setting {name}; {hint} has: {', '.join(close)}"


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """`["learning_rate=1e-3", "hidden=[64, 64]"]` to a dictionary; values are read as YAML."""
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals and text):
            raise FeverError(f"{pair} is not a setting with a value; write settings as name=value")
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
