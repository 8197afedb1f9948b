"""RLlib as a provider of algorithms: all that the rest of fever calls of this package, apart from `legacy`."""

from __future__ import annotations

from fever.algos.registry import Provider
from fever.config import RunConfig
from fever.rllib.adapter import bundles_of, check_sizes, prepare_rllib
from fever.rllib.catalogue import names
from fever.rllib.environment import with_env_config
from fever.rllib.legacy.old_names import MODEL_SETTINGS, RENAMED, RUN_FIELDS
from fever.rllib.play import RllibPolicy, film, play
from fever.rllib.settings import check_settings, describe, split_settings


class RllibProvider(Provider):
    """Serves `rllib:NAME` and `rllib:module:Name`. RLlib itself is imported by the first call that needs it."""

    pickles = True
    network_settings = frozenset({*MODEL_SETTINGS, "model_config", "rl_module_spec"})

    names = staticmethod(names)
    describe_settings = staticmethod(describe)
    check_settings = staticmethod(check_settings)
    check_sizes = staticmethod(check_sizes)
    prepare = staticmethod(prepare_rllib)
    env_source = staticmethod(with_env_config)
    trial_bundles = staticmethod(bundles_of)
    load_policy = staticmethod(RllibPolicy)
    play = staticmethod(play)
    film = staticmethod(film)

    def run_field(self, setting: str) -> str | None:
        return RUN_FIELDS.get(RENAMED.get(setting, setting))

    def resolve(self, config: RunConfig) -> RunConfig:
        return split_settings(config)[0]
