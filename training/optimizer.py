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
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


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


def _matrices(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
