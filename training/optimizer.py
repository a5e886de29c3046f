"""Optimizers by name, with the paper's schedule (DFlash, appendix A.1)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import muon

from training.config import OptimizerConfig

# Scales Muon's updates to the size of AdamW's, so that both take the same learning rate (arXiv 2502.16982).
ADAMW_SIZE = 0.2


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return the optimizer of a run of `steps` steps: clipped gradients, AdamW, or Muon for matrices."""
    rate = schedule(config, steps)
    if config.name == "muon":
        update = muon(rate, consistent_rms=ADAMW_SIZE, weight_decay=config.weight_decay)
    else:
        update = optax.adamw(rate, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(_clip(config.clip), update)


def norm(gradients: Any) -> Array:
    """Return the norm of all gradients together.

    The last layers' come first, as they do from a backward pass: a compiler that computes things as they are asked for
    then keeps nothing of a layer longer than it has to. It is half of a step's memory on CPUs.
    """
    squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(reversed(squares), jnp.zeros(())))


def updates_of(moments: Any) -> Array:
    """Return how many updates an optimizer's state has seen; steps without weight are none."""
    return next(leaf for leaf in jax.tree.leaves(moments) if leaf.dtype == jnp.int32)


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by step: up to the peak in equal steps, none of them zero, then a cosine to zero."""
    warmup = round(config.warmup * steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(warmup, 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
    )


def _clip(most: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm`, by our norm."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        size = norm(gradients)
        return jax.tree.map(lambda leaf: jnp.where(size < most, leaf, leaf / size * most), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # noqa: ARG005


def _matrices(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
