"""Turns settings into RLlib's configuration: each goes to the method of `AlgorithmConfig` that has its parameter."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fever.algos.registry import without_prefix
from fever.config import RunConfig, validate
from fever.errors import FeverError
from fever.plugins.names import import_attribute
from fever.rllib.catalogue import find_class, silence
from fever.rllib.legacy.old_names import RLLIB_ALGORITHMS, RUN_FIELDS
from fever.rllib.legacy.reader import rename

if TYPE_CHECKING:
    from fever.rllib.environment import Spaces

METHODS = (  # of RLlib's AlgorithmConfig that take settings, in the order of `fever config`
    "training", "rl_module", "env_runners", "learners", "multi_agent", "evaluation", "offline_data", "reporting",
    "fault_tolerance", "checkpointing", "debugging", "callbacks", "environment", "experimental", "python_environment",
)  # fmt: skip
SETTING_OF_FIELD = {field: name for name, field in RUN_FIELDS.items()}  # field of RunConfig -> RLlib's name for it
NOT_SETTINGS = {"env", "env_config", "log_level"}  # parameters that fever sets itself
IMPORTED = re.compile(r"_(fn|class|cls|connector|spec|function|module)$|^on_")  # settings that may be "module:Name"
SHARED = "shared"  # name of the policy that all agents share
KNOWN = {"AlgorithmConfig", *(f"{name}Config" for name in RLLIB_ALGORITHMS)}  # with settings in tables of old names
FILTER = "MeanStdFilter"
FILTERS = (FILTER, "NoFilter")


def split_settings(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with settings by RLlib's current names, and notes on those that were renamed.

    Settings for workers, environments, seed and GPUs become fields of RunConfig; environments of each runner once the
    number of workers is known, by which they are multiplied.
    """
    settings, notes = rename(config.settings, config.algo, own_names(config.algo))
    update: dict[str, Any] = {}
    for field, name in SETTING_OF_FIELD.items():
        if name not in settings:
            continue
        value, given = settings[name], getattr(config, field)
        if field == "envs" and isinstance(value, int):
            workers = update.get("workers", config.workers)
            if given is None and not isinstance(workers, int):
                continue
            value = value * max(1, workers if isinstance(workers, int) else 1)
        if field in ("workers", "envs") and given not in (None, value):
            raise FeverError(f"{name}={settings[name]} contradicts {field}={given}; give one of them")
        update[field] = value
        del settings[name]
    values = {**config.model_dump(), **update, "settings": settings}
    return validate(RunConfig, values, config.algo), notes


def own_names(algo: str) -> frozenset[str]:
    """Settings that an algorithm declares itself, for algorithms that are not in the tables of old names."""
    if without_prefix(algo) in RLLIB_ALGORITHMS:
        return frozenset()
    return frozenset(
        name
        for owner in type(default_config(algo)).__mro__
        for method in METHODS
        if method in vars(owner) and owner.__name__ not in KNOWN
        for name in inspect.signature(vars(owner)[method]).parameters
    )


def check_settings(algo: str, settings: dict[str, Any]) -> None:
    """Raise FeverError for an unknown algorithm or setting, or a value that cannot be used."""
    config = RunConfig(env="none", algo=algo, settings=settings)
    fill(default_config(algo), split_settings(config)[0].settings, algo)


def default_config(algo: str) -> Any:
    """RLlib's default configuration of an algorithm."""
    found = find_class(algo)
    with silence():
        config = found.get_default_config()
        config.algo_class = found  # a subclass may have its parent's configuration
        config.framework("torch")
    return config


def fill(config: Any, settings: dict[str, Any], algo: str, spaces: Spaces | None = None) -> Any:
    """Apply settings to RLlib's configuration and return it. Raises FeverError for an unknown name or a wrong type.

    `spaces` are the environment's; None only checks the settings. `policies` may be `shared` or `separate`.
    """
    known, agents = parameters(config), spaces.agents if spaces is not None else None
    default_network = "rl_module_spec" not in settings and without_prefix(algo) in RLLIB_ALGORITHMS
    if agents:
        settings = _with_policies(config, settings, agents)
    with silence():
        for name, value in settings.items():
            if name == "policy_mapping_fn" and isinstance(value, dict):  # RLlib would call whatever it names
                raise FeverError("policy_mapping_fn must be a name (module:function), not a mapping")
            if name == "observation_filter":
                _check_filter(value, settings)
            elif name == "policies" and isinstance(value, str):
                _policies(config, value, agents)
            elif name not in known:
                raise FeverError(_unknown(name, list(known), algo))
            else:
                if name == "model_config" and default_network:
                    _check_model(config, value, algo)
                    value = _with_sequences(value)
                else:
                    _check_kind(config, name, value, algo)
                if isinstance(value, str) and ":" in value and IMPORTED.search(name):
                    value = import_attribute(*value.rsplit(":", 1))
                _call(algo, name, value, known[name])
        if spaces is not None:
            _connect(config, settings, spaces)
    return config


def validated(config: Any, algo: str) -> Any:
    """The same configuration after RLlib's own validation. Raises FeverError."""
    with silence():
        try:
            config.validate()
        except (ValueError, TypeError, KeyError, NotImplementedError, ImportError) as error:
            raise FeverError(f"RLlib refuses this configuration of {algo}: {first_sentence(error)}") from error
    return config


def parameters(config: Any) -> dict[str, Callable[..., Any]]:
    """Every setting that a configuration has, and the method that takes it."""
    found: dict[str, Callable[..., Any]] = {}
    for method in METHODS:
        for owner in type(config).__mro__:  # `training` of a subclass has `**kwargs` for its parents' parameters
            function = vars(owner).get(method)
            for name, one in inspect.signature(function).parameters.items() if function is not None else ():
                old = type(one.default) is int and one.default == -1  # DEPRECATED_VALUE of RLlib
                plain = one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                if plain and not old and name not in NOT_SETTINGS and name != "self" and not name.startswith("_"):
                    found.setdefault(name, getattr(config, method))
    return found


def describe(algo: str) -> list[tuple[str, str, str, str]]:
    """Name, default, first sentence of RLlib's documentation and source of every setting of an algorithm."""
    config = default_config(algo)
    rows = []
    for name, method in parameters(config).items():
        with silence():
            default = _default(config, name)
        shown = str(default).splitlines()[0][:40] if default is not None else "null"
        rows.append((name, shown, _meaning(config, method, name), "RLlib"))
    return rows


def first_sentence(error: BaseException) -> str:
    """The first sentence of an exception's message, at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z\])`'\"}])[.!] ", text)[0].rstrip(".!")[:300]


def _call(algo: str, name: str, value: Any, method: Callable[..., Any]) -> None:
    try:
        method(**{name: value})
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise FeverError(f"{algo}: {name}={value!r} cannot be used: {first_sentence(error)}") from error


def _default(config: Any, name: str) -> Any:
    for attribute in (name, f"_{name}"):
        try:
            return getattr(config, attribute)
        except (AttributeError, ValueError):
            continue
    return None


def _check_kind(config: Any, name: str, value: Any, algo: str) -> None:
    """Refuse text for a number, and other values than booleans for one. RLlib would fail much later."""
    default = _default(config, name)
    if isinstance(default, bool):
        kind, wrong = "true or false", not isinstance(value, bool | None)
    else:
        kind, wrong = "a number", isinstance(default, int | float) and isinstance(value, str) and value != "auto"
    if wrong:
        raise FeverError(f"{algo}: {name}={value!r} cannot be used: it takes {kind}; the default is {default!r}")


def _check_model(config: Any, value: Any, algo: str) -> None:
    """Refuse settings that RLlib's default networks do not have, which RLlib would ignore."""
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    if not isinstance(value, dict):
        raise FeverError(
            f"{algo}: model_config={value!r} cannot be used: it takes a mapping such as {{fcnet_hiddens: [64]}}"
        )
    known = [*DefaultModelConfig.__dataclass_fields__, *config.model_config]
    for name in value:
        if name not in known:
            raise FeverError(_unknown(name, known, f"model_config of {algo}").partition("; `fever")[0])
        widths = value[name]
        whole = isinstance(widths, list | tuple) and all(type(one) is int for one in widths)
        if name.endswith("_hiddens") and not whole:
            raise FeverError(
                f"{algo}: model_config has {name}={widths!r}, which cannot be used: it takes a list of whole numbers"
            )


def _with_sequences(model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a network with the length of an LSTM's sequences, which RLlib wants to be given: its default."""
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    return {"max_seq_len": DefaultModelConfig().max_seq_len, **model} if model.get("use_lstm") else model


def _unknown(name: str, known: list[str], algo: str) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{algo} has no setting {name}; {hint}`fever config {algo}` lists them"


def _check_filter(value: Any, settings: dict[str, Any]) -> None:
    if value not in FILTERS:
        raise FeverError(f"observation_filter={value!r} cannot be used: choose one of {', '.join(FILTERS)}")
    if value == FILTER and "env_to_module_connector" in settings:
        raise FeverError(f"observation_filter={value} is a connector; add it to your env_to_module_connector")


def _connect(config: Any, settings: dict[str, Any], spaces: Spaces) -> None:
    """Add the connectors that flatten observations for RLlib's default networks, and that `observation_filter` names.

    A user's own networks or connectors get the observations as they are.
    """
    from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter

    several = bool(spaces.agents)
    own = "rl_module_spec" in settings or getattr(config, "_env_to_module_connector", None) is not None
    pieces: list[Callable[[], Any]] = []
    if spaces.flattened and not own:
        agents = spaces.flattened if several else None
        pieces.append(functools.partial(FlattenObservations, multi_agent=several, agent_ids=agents))
    if settings.get("observation_filter") == FILTER:
        pieces.append(functools.partial(MeanStdFilter, multi_agent=several))
    if pieces:
        config.env_runners(env_to_module_connector=lambda env, spaces, device: [piece() for piece in pieces])


def _with_policies(config: Any, settings: dict[str, Any], agents: list[Any]) -> dict[str, Any]:
    """The settings with `policies`, and with `policy_mapping_fn` if policies are named like the agents."""
    mapped, policies = "policy_mapping_fn" in settings, settings.get("policies")
    if "policies" not in settings:
        if mapped:
            raise FeverError("policy_mapping_fn chooses among policies; name them: policies=[a,b]")
        return {**settings, "policies": SHARED}
    default = getattr(config, "DEFAULT_POLICY_MAPPING_FN", None)  # a user's own algorithm may have another
    if mapped or config.policy_mapping_fn is not default or not isinstance(policies, list | dict):
        return settings
    if set(policies) == set(map(str, agents)):
        return {**settings, "policy_mapping_fn": _by_agent}
    raise FeverError(
        f"policies={list(policies)} are not named like the agents ({', '.join(map(str, agents))}); map one "
        "to the other with policy_mapping_fn=module:function"
    )


def _policies(config: Any, value: str, agents: list[Any] | None) -> None:
    """Configure one policy for all agents, or one for each."""
    if value not in ("shared", "separate"):
        raise FeverError(f"policies={value} cannot be used: choose shared, separate, or a list of names")
    if agents is None:
        return  # the settings are only checked
    if not agents:
        raise FeverError(f"policies={value} is for environments with several agents")
    if value == "separate":
        config.multi_agent(policies={str(one) for one in agents}, policy_mapping_fn=_by_agent)
    else:
        config.multi_agent(policies={SHARED}, policy_mapping_fn=_shared)


def _by_agent(agent: Any, *_: Any, **__: Any) -> str:
    return str(agent)


def _shared(*_: Any, **__: Any) -> str:
    return SHARED


def _meaning(config: Any, method: Callable[..., Any], name: str) -> str:
    """The first sentence on a parameter in the docstring of its method, or of the method of a base class."""
    for owner in type(config).__mro__:
        function = vars(owner).get(method.__name__)
        text = inspect.getdoc(function) or "" if function is not None else ""
        match = re.search(rf"^ +{name}: (.*?)(?=^ {{0,5}}\S|\Z)", text, re.MULTILINE | re.DOTALL)
        if match:
            return re.split(r"(?<=[a-z)`])\. ", " ".join(match[1].split()))[0].rstrip(".")
    return ""
