"""Files for RLlib's former Ape-X, which is fever's own now."""

from __future__ import annotations

from fever.algos.registry import config_of
from fever.config import validate
from tests.rllib.examples import example, old

RLLIB = {  # defaults of RLlib's Ape-X, in fever's words
    "n_step": 3, "learning_rate": 5e-4, "max_gradient_norm": 40.0, "batch": 512, "replay_ratio": 1, "target": "hard",
    "target_updates": 980, "warmup": 50_000, "buffer": 2_000_000, "priority_exponent": 0.6, "importance": 0.4,
    "explore_steps": 50, "report_steps": 25_000, "updates": 4, "epsilon_steps": 1,
}  # fmt: skip


def test_apex_is_fevers_own() -> None:
    found = example("atari-apex.yaml")
    assert (found.values["algo"], found.values["workers"], found.values["envs"]) == ("apex", 8, 64)
    assert found.values["settings"] == {
        **RLLIB,
        "double": True,
        "dueling": True,
        "n_step": 3,
        "learning_rate": 0.0001,
        "convolution_features": 512,  # the one layer behind the convolutions
        "prioritized": True,
        "buffer": 1_000_000,
        "priority_exponent": 0.5,
        "warmup": 50_000,
        "explore_steps": 20,
        "batch": 512,
        "target": "hard",
        "target_updates": 100,  # 50,000 transitions in batches of 512, rounded up to whole calls of 4
        "report_steps": 25_000,
    }
    said = "\n".join(found.notes)
    assert "adam_epsilon" in said
    assert "exploration_config" in said
    assert "noisy" not in said  # it was off


def test_apex_of_2018() -> None:
    """As RLlib's own experiments wrote it: the buffer and the schedule of exploration at the top, `gpu`."""
    config = {
        "double_q": False, "dueling": False, "num_atoms": 1, "noisy": False, "n_step": 3, "lr": 0.0002,
        "adam_epsilon": 0.0002, "hiddens": [512], "buffer_size": 500_000, "schedule_max_timesteps": 1_000_000,
        "exploration_final_eps": 0.02, "exploration_fraction": 0.2, "prioritized_replay_alpha": 0.6,
        "beta_annealing_fraction": 1.0, "final_prioritized_replay_beta": 1.0, "gpu": True, "num_workers": 4,
        "num_envs_per_worker": 2, "sample_batch_size": 50, "train_batch_size": 256,
        "target_network_update_freq": 20_000, "timesteps_per_iteration": 10_000,
    }  # fmt: skip
    found = old("APEX", "QbertNoFrameskip-v4", **config)
    assert (found.values["env"], found.values["algo"]) == ("ALE/Qbert-v5", "apex")
    assert (found.values["workers"], found.values["envs"]) == (4, 8)
    assert found.values["settings"] == {
        **RLLIB, "double": False, "dueling": False, "n_step": 3, "learning_rate": 0.0002, "convolution_features": 512,
        "buffer": 500_000, "priority_exponent": 0.6, "explore_steps": 50, "batch": 256, "target": "hard",
        "target_updates": 80, "report_steps": 10_000,
    }  # fmt: skip
    validate(config_of("apex"), found.values["settings"], "apex")
    lost = " ".join(note for note in found.notes if note.startswith("not translated"))
    assert all(name in lost for name in ("adam_epsilon", "beta_annealing_fraction", "exploration_final_eps"))
    assert "gpu" not in lost


def test_apex_of_vectors_has_all_its_layers() -> None:
    found = old("APEX_DQN", hiddens=[64], model={"fcnet_hiddens": [32, 16]}, training_intensity=4, noisy=True)
    assert found.values["settings"] == {**RLLIB, "hidden": [32, 16, 64], "replay_ratio": 4}
    assert "not translated: noisy: fever has no noisy networks" in found.notes


def test_defaults_of_rllibs_apex_are_used_and_named() -> None:
    found = old("APEX", train_batch_size=64)
    assert found.values["settings"] == {**RLLIB, "batch": 64, "target_updates": 7816}
    validate(config_of("apex"), found.values["settings"], "apex")
    [said] = [note for note in found.notes if note.startswith("not in the file")]
    assert "warmup=50000" in said
    assert "batch=" not in said
