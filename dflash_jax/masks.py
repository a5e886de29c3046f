"""Who sees whom: each mask derived from one relation between query and key positions."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.config import LayerConfig


def visible(layer: LayerConfig, queries: Int[Array, "#b t"], keys: Int[Array, "#b s"]) -> Bool[Array, "#b t s"]:
    """Say which keys each query may see by the positions of both (law 3); either batch may be 1."""
    distance = queries[:, :, None] - keys[:, None, :]
    seen = jnp.ones_like(distance, bool)
    if layer.causal:
        seen &= distance >= 0
    if layer.window is not None:
        seen &= distance < layer.window
        if not layer.causal:
            seen &= -distance < layer.window
    return seen


def positions(start: Int[Array, "b"], t: int) -> Int[Array, "b t"]:
    """Return the positions start…start+t-1 of each row."""
    return start[:, None] + jnp.arange(t, dtype=start.dtype)[None]


def cached(layer: LayerConfig, start: Int[Array, "b"], t: int, s: int) -> Bool[Array, "b t s"]:
    """Mask of t target positions over a buffer that holds them already; causality hides the rows past them."""
    return visible(layer, positions(start, t), jnp.arange(s, dtype=start.dtype)[None])


def context(layer: LayerConfig, start: Int[Array, "b"], t: int, s: int) -> Bool[Array, "b t s"]:
    """Mask of a draft's block over its context buffer: positions strictly before the anchor (law 5)."""
    rows = jnp.arange(s, dtype=start.dtype)[None]
    return visible(layer, positions(start, t), rows) & (rows < start[:, None])[:, None]


def block(layer: LayerConfig, t: int) -> Bool[Array, "1 t t"]:
    """Mask of a draft's block over itself."""
    slots = jnp.arange(t)[None]
    return visible(layer, slots, slots)
