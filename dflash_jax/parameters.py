"""The parameter trees of both models: their shapes, without making them, and random ones."""

from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import cache
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft import Draft
from dflash_jax.target import Target

Params = dict[str, Any]


def init(config: TargetConfig | DraftConfig, key: jax.Array) -> Params:
    """Return random float32 parameters: a plain nested dictionary of arrays."""
    buffers = cache.empty(config, 1, 2, jnp.dtype(jnp.float32))
    if isinstance(config, TargetConfig):
        tokens, start = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        return Target(config).init(key, tokens, buffers, start)["params"]
    features = jnp.zeros((1, 1, len(config.target_layer_ids) * config.hidden_size), jnp.float32)
    block = jnp.zeros((1, 1, config.hidden_size), jnp.float32)
    return Draft(config).init(key, features, block, buffers, method="initialise")["params"]


def shapes(config: TargetConfig | DraftConfig) -> Params:
    """Return the tree of `init` with shapes and dtypes in place of arrays; nothing is computed."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))
