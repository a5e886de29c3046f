"""The training objective: losses by name, over logits that never exist for more than a few blocks at once.

Slot k of a block speaks for the position k after its anchor; p is what the target says there, q what the draft says,
and x the token that stands there. Every loss is a weighted sum over slots, divided by the sum of the weights.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.sampling import likeliest

# D-PACE's floor under a slot's probability (arXiv 2605.18810).
FLOOR = 0.5
# How fast LK's mix turns from KL to acceptance (arXiv 2602.23881).
SHARPNESS = 3.0


class Slots(NamedTuple):
    """Slots 1…t-1 of some blocks. `teacher`, the target's logits there, is None for losses that do not ask for it."""

    logits: Float[Array, "c u v"]
    tokens: Int[Array, "c u"]
    weighted: Bool[Array, "c u"]
    teacher: Float[Array, "c u v"] | None


class Sums(NamedTuple):
    """Sums over blocks, of which metrics are ratios; sums over devices are sums of these.

    `right` and `counted` are by slot; `emitted` is the tokens that decoding would have emitted, drafts and the target's
    own, over `blocks` blocks.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    right: Float[Array, "u"]
    counted: Float[Array, "u"]
    emitted: Float[Array, ""]
    blocks: Float[Array, ""]


# Takes slots and the decay γ; returns each slot's loss and weight.
Loss = Callable[[Slots, float], tuple[Float[Array, "c u"], Float[Array, "c u"]]]


def decay(slots: Slots, gamma: float) -> tuple[Float[Array, "c u"], Float[Array, "c u"]]:
    """Cross entropy that counts less the later the slot (DFlash, section 4): -log q(x), w_k = exp(-(k-1)/γ)."""
    return -_log_chance(slots), _decaying(slots, gamma)


def dpace(slots: Slots, gamma: float) -> tuple[Float[Array, "c u"], Float[Array, "c u"]]:  # noqa: ARG001
    """Cross entropy that counts what a slot adds to the expected acceptance (D-PACE, arXiv 2605.18810).

    With a = 1/2, q̃_j = (1-a) q_j(x_j) + a and P_m = Π_{i≤m} q̃_i, the weight w_j = Σ_{m≥j} P_m over weighted slots m is
    the gradient of Σ_m P_m in log q̃_j. Weights are not differentiated.
    """
    chances = jnp.exp(jax.lax.stop_gradient(_log_chance(slots)))
    survival = jnp.cumprod(jnp.where(slots.weighted, (1 - FLOOR) * chances + FLOOR, 1.0), axis=-1)
    reached = jnp.where(slots.weighted, survival, 0.0)
    return -_log_chance(slots), jnp.cumsum(reached[..., ::-1], axis=-1)[..., ::-1] * slots.weighted


def kl(slots: Slots, gamma: float) -> tuple[Float[Array, "c u"], Float[Array, "c u"]]:
    """KL(p‖q) = Σ_v p (log p - log q), weighted as `decay`."""
    return _divergence(slots), _decaying(slots, gamma)


def lk(slots: Slots, gamma: float) -> tuple[Float[Array, "c u"], Float[Array, "c u"]]:
    """Mix KL with the acceptance itself (LK, arXiv 2602.23881), weighted as `decay`.

    λ KL(p‖q) + (1-λ)(1-α), with α = Σ_v min(p, q) and λ = exp(-3α), not differentiated.
    """
    p, q = jnp.exp(_log(_teacher(slots))), jnp.exp(_log(slots.logits))
    accepted = jnp.minimum(p, q).sum(axis=-1)
    share = jax.lax.stop_gradient(jnp.exp(-SHARPNESS * accepted))
    return share * _divergence(slots) + (1 - share) * (1 - accepted), _decaying(slots, gamma)


LOSSES: dict[str, Loss] = {"decay": decay, "dpace": dpace, "kl": kl, "lk": lk}
NEED_TEACHER = ("kl", "lk")


def default_gamma(block_size: int) -> float:
    """Return the paper's γ: 4, 5 and 7 for blocks of 8, 10 and 16 (section 5), and what lies on the lines between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def sums(loss: Loss, gamma: float, slots: Slots) -> Sums:
    """Add up losses and what metrics are made of."""
    values, weights = loss(slots, gamma)
    right = (likeliest(slots.logits) == slots.tokens) & slots.weighted
    accepted = jnp.cumprod(right.astype(jnp.float32), axis=-1)
    blocks = slots.weighted[:, 0].astype(jnp.float32).sum()
    return Sums(
        loss=(values * weights).sum(),
        weight=weights.sum(),
        right=right.astype(jnp.float32).sum(axis=0),
        counted=slots.weighted.astype(jnp.float32).sum(axis=0),
        emitted=accepted.sum() + blocks,
        blocks=blocks,
    )


def _log_chance(slots: Slots) -> Float[Array, "c u"]:
    # Not a gather: it would bring together a vocabulary that lies on several devices.
    said = jax.nn.one_hot(slots.tokens, slots.logits.shape[-1], dtype=bool)
    return jnp.where(said, _log(slots.logits), 0).sum(axis=-1)


def _decaying(slots: Slots, gamma: float) -> Float[Array, "c u"]:
    weights = jnp.exp(-jnp.arange(slots.tokens.shape[-1], dtype=slots.logits.dtype) / gamma)
    return slots.weighted * weights[None]


def _divergence(slots: Slots) -> Float[Array, "c u"]:
    p = _log(_teacher(slots))
    return (jnp.exp(p) * (p - _log(slots.logits))).sum(axis=-1)


def _teacher(slots: Slots) -> Float[Array, "c u v"]:
    if slots.teacher is None:
        raise ValueError("this loss is of the target's logits, and there are none")
    return jax.lax.stop_gradient(slots.teacher)


def _log(logits: Float[Array, "c u v"]) -> Float[Array, "c u v"]:
    return jax.nn.log_softmax(logits, axis=-1)
