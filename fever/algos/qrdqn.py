"""Quantile regression DQN (Dabney et al. 2018): DQN that learns the distribution of returns, not only its mean.

The network gives N quantiles of the return of every action. The action with the highest mean is the greedy one. Double,
dueling, n-step and prioritised replay, target network and exploration are DQN's; here is the loss.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fever.algos.base import build_network
from fever.algos.dqn import DQN, DQNConfig, huber
from fever.config import setting
from fever.policy import Network


class QRDQNConfig(DQNConfig):
    """Settings of QR-DQN."""

    learning_rate: float = setting(2.3e-3, "of the optimizer", "rl-zoo, QR-DQN CartPole-v1", gt=0)
    quantiles: int = setting(
        25, "quantiles of an action's return (N)", "rl-zoo, QR-DQN Acrobot-v1; Dabney et al. 2018, Atari: 200", gt=0
    )
    loss: Literal["huber", "absolute"] = setting(  # type: ignore[assignment]  # of quantiles there is no squared one
        "huber", "of the quantiles: huber is quadratic below 1 (QR-DQN-1), absolute nowhere (QR-DQN-0)", "Dabney 2018"
    )
    max_gradient_norm: float | None = setting(
        None, "gradients are scaled down to this norm; null: never", "sb3-contrib", gt=0
    )


class QRDQN(DQN):
    """DQN whose values are quantiles. TD errors, and with them priorities, are differences of means."""

    Config: Any = QRDQNConfig
    config: QRDQNConfig

    def build_network(self) -> Network:
        dueling, quantiles = self.config.dueling, self.config.quantiles
        more = {"value_head": dueling, "action_values": True, "dueling": dueling, "quantiles": quantiles}
        return build_network(self.config, self.task, **more)

    def values(self, flat: Any, observations: Any) -> Any:
        """Quantiles of the returns of all actions `[B, A, N]`."""
        params = self.flat.unpack(flat)
        return self.network.action_quantiles(params, self.network.features(params, observations, jnp), jnp)

    def means(self, values: Any) -> Any:
        return values.mean(-1)

    def pick(self, values: Any, chosen: Any) -> Any:
        """Quantiles `[N, B]` of one action of every row: TD targets are then sums with rewards `[B]` as in DQN."""
        return (values * chosen[..., None]).sum(1).T

    def losses(self, chosen: Any, td_targets: Any) -> tuple[Any, Any]:
        """Losses and TD errors `[B]` from quantiles and TD targets `[N, B]`."""
        losses = quantile_losses(chosen, td_targets, self.config.loss == "huber")
        return losses, chosen.mean(0) - td_targets.mean(0)


def quantile_losses(quantiles: Any, td_targets: Any, smooth: bool = True) -> Any:
    """The quantile regression loss `[B]` of quantiles `[N, B]` against samples of the target distribution `[M, B]`.

    sum_i mean_j |tau_i - 1{u_ij < 0}| l(u_ij),  u_ij = target_j - quantile_i,  tau_i = (i + 0.5) / N

    with the Huber loss l, or |u| if not `smooth`.
    """
    count = len(quantiles)
    levels = ((np.arange(count) + 0.5) / count).astype(np.float32)[:, None, None]
    differences = td_targets[None] - quantiles[:, None]  # [N, M, B]
    sizes = huber(differences) if smooth else jnp.abs(differences)
    return (jnp.abs(levels - (differences < 0)) * sizes).mean(1).sum(0)
