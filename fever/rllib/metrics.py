"""Translates RLlib's results: episodes, steps, seconds by phase, and the learner's metrics."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from typing import Any

from fever.sampling.runner import scalars
from fever.sampling.spec import Episode, Report

EPISODES = "fever_episodes"  # the metric of RLlib's that `log_episode` writes
NO_SECONDS = {"env": 0.0, "total": 0.0}
RENAMED = {  # RLlib's name of a metric -> fever's name for the same metric
    "vf_loss": "value_loss",
    "total_loss": "loss",
    "mean_kl_loss": "kl",
    "vf_explained_var": "explained_variance",
    "default_optimizer_learning_rate": "learning_rate",
    "gradients_default_optimizer_global_norm": "gradient_norm",
    "qf_mean": "value_mean",
    "td_error_mean": "td_error",
    "alpha_value": "temperature",
}
COUNTERS = ("num_", "weights_seq_no", "module_train_batch_size_mean", "diff_num_grad_updates")  # not shown as metrics


def log_episode(*, episode: Any, env_runner: Any, metrics_logger: Any, env_index: int = 0, **more: Any) -> None:
    """RLlib's callback at the end of an episode: log return and length, summed over the chunks of the episode."""
    pieces = [episode, *(more.get("prev_episode_chunks") or ())]
    total = float(sum(piece.get_return() for piece in pieces))
    length = int(sum(piece.env_steps() for piece in pieces))
    info = episode.get_infos(-1)
    worker = max(0, (env_runner.worker_index or 0) - 1)
    row = (total, length, worker, socket.gethostname(), env_index, scalars(info) if isinstance(info, dict) else {})
    metrics_logger.log_value(EPISODES, row, reduce="item_series")


def episodes_of(result: dict[str, Any]) -> Iterator[tuple[int, str, Episode]]:
    """(worker index, host, episode) of every episode that ended."""
    rows = result.get("env_runners", {}).get(EPISODES)
    for total, length, worker, host, env_index, info in rows if isinstance(rows, list) else ():  # NaN if none ended
        yield worker, host, Episode(total, length, env_index, info)


def reports_of(steps: int, episodes: Iterator[tuple[int, str, Episode]]) -> list[Report]:
    """One report for every env runner that finished an episode.

    RLlib does not report steps by runner, so they are divided in proportion to the lengths of the runner's episodes.
    """
    reports: dict[tuple[int, str], Report] = {}
    for worker, host, episode in episodes:
        report = reports.setdefault((worker, host), Report(0, [], worker, 0, dict(NO_SECONDS), host))
        report.episodes.append(episode)
    found = [reports[key] for key in sorted(reports)]
    lengths = [sum(episode.length for episode in report.episodes) for report in found]
    given = 0
    for place, report in enumerate(found, 1):
        report.steps = steps * sum(lengths[:place]) // max(1, sum(lengths)) - given
        given += report.steps
    return found


def steps_metric(offline: bool) -> tuple[str, ...]:
    """RLlib's metric of environment steps so far; for offline algorithms, of the steps in the data learned from."""
    if offline:
        return "learners", "__all_modules__", "num_env_steps_trained_lifetime"
    return "env_runners", "num_env_steps_sampled_lifetime"


def sampled_steps(result: dict[str, Any], offline: bool) -> int:
    """The value of `steps_metric` in a result, 0 if it is not there."""
    value: Any = result
    for name in steps_metric(offline):
        value = value.get(name, {})
    return int(_number(value) or 0)


def phases_of(result: dict[str, Any], wall: float) -> dict[str, float]:
    """Seconds of an iteration by phase; "env" is the part of "sample" in environments. Empty if RLlib reports none.

    RLlib's timers are running means, so the shares change slowly.
    """
    timers, runners = result.get("timers", {}), result.get("env_runners", {})
    whole, sample = _number(timers.get("training_iteration")), _number(timers.get("env_runner_sampling_timer"))
    if not whole or sample is None:
        return {}
    scale = wall / whole * (_number(result.get("num_training_step_calls_per_iteration")) or 1.0)
    parts = {
        "env": _number(runners.get("env_step_timer")),
        "inference": _number(runners.get("rlmodule_inference_timer")),
        "before": _number(runners.get("env_to_module_connector", {}).get("connector_pipeline_timer")),
        "behind": _number(runners.get("module_to_env_connector", {}).get("connector_pipeline_timer")),
    }
    known = sum(value for value in parts.values() if value)
    return {
        "sample": sample * scale,
        "env": sample * scale * (parts["env"] or 0.0) / known if known else 0.0,
        "learn": (_number(timers.get("learner_update_timer")) or 0.0) * scale,
        "transfer": (_number(timers.get("synch_weights")) or 0.0) * scale,
    }


def learner_metrics(result: dict[str, Any]) -> dict[str, float]:
    """The learner's metrics of every policy, as `POLICY/METRIC` if there are several, and of evaluation."""
    modules = {name: rows for name, rows in result.get("learners", {}).items() if name != "__all_modules__"}
    metrics: dict[str, float] = {}
    for module, rows in modules.items():
        prefix = f"{module}/" if len(modules) > 1 else ""
        for name, value in rows.items():
            number = _number(value)
            if number is not None and not name.startswith(COUNTERS):
                metrics[prefix + RENAMED.get(name, name)] = number
    runners, evaluation = result.get("env_runners", {}), result.get("evaluation", {}).get("env_runners", {})
    agents = runners.get("agent_episode_returns_mean", {})
    for agent, value in agents.items() if len(agents) > 1 else ():
        metrics[f"return_mean/{agent}"] = float(value)
    if (number := _number(evaluation.get("episode_return_mean"))) is not None:
        metrics["evaluation_return_mean"] = number
    return metrics


def _number(value: Any) -> float | None:
    """A finite float, or None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
