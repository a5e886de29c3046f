"""Where a row's blocks stand in training, and what their slots are to say (law 11).

A row may hold several documents, one after the other. `starts` says for each position where its document starts, so two
positions are of the same document if their starts are equal.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from dflash_jax import masks
from dflash_jax.block_attention import Spans
from dflash_jax.config import LayerConfig


class Anchors(NamedTuple):
    """The positions in their row at which blocks stand, in rising order; those that are not `valid` come last."""

    positions: Int[Array, "b m"]
    valid: Bool[Array, "b m"]


class Labels(NamedTuple):
    """What slots 1…t-1 are to say; slot k has `weight` only if all of slots 1…k are supervised (law 11)."""

    tokens: Int[Array, "b m u"]
    weighted: Bool[Array, "b m u"]


def candidates(supervised: Bool[Array, "b s"], starts: Int[Array, "b s"]) -> Bool[Array, "b s"]:
    """Say which positions may be anchors: they and the next are supervised, and of one document (law 11)."""
    following = supervised[:, 1:] & (starts[:, 1:] == starts[:, :-1])
    return supervised & jnp.pad(following, ((0, 0), (0, 1)))


def draw(key: PRNGKeyArray, allowed: Bool[Array, "b s"], count: int) -> Anchors:
    """Draw up to `count` of the allowed positions of each row, without replacement, all sets alike likely.

    Args:
        key: the step's; rows draw independently.
        allowed: as `candidates` returns.
        count: m, at most s.
    """
    chances = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
    best, positions = jax.lax.top_k(chances, count)
    positions = jnp.sort(jnp.where(best >= 0, positions, allowed.shape[1]), axis=1)
    valid = positions < allowed.shape[1]
    return Anchors(jnp.where(valid, positions, 0).astype(jnp.int32), valid)


def label(
    tokens: Int[Array, "b s"], supervised: Bool[Array, "b s"], starts: Int[Array, "b s"], anchors: Anchors, t: int
) -> Labels:
    """Look up what slots 1…t-1 of each block are to say: slot k the token k positions after the anchor (law 4)."""
    at = anchors.positions[..., None] + jnp.arange(1, t, dtype=anchors.positions.dtype)[None, None]
    inside = at < tokens.shape[1]
    at = jnp.minimum(at, tokens.shape[1] - 1)

    def look(array: Array) -> Array:
        return jax.vmap(lambda row, index: row[index])(array, at)

    home = jnp.take_along_axis(starts, anchors.positions, axis=1)
    right = inside & look(supervised) & (look(starts) == home[..., None]) & anchors.valid[..., None]
    return Labels(look(tokens), jnp.cumprod(right.astype(jnp.int32), axis=-1).astype(bool))


def among(labels: Labels, rows: Int[Array, "v"], count: int) -> Labels:
    """Say labels by their rows of a head that has only some of the vocabulary.

    What such a head cannot say counts as if it were not supervised: no slot past it has weight (law 11).

    Args:
        labels: by token.
        rows: each token's row, or `count` where it has none.
        count: rows of the head.
    """
    found = rows[labels.tokens]
    sayable = jnp.cumprod((found < count).astype(jnp.int32), axis=-1).astype(bool)
    return Labels(found, labels.weighted & sayable)


def block_spans(layer: LayerConfig, starts: Int[Array, "b s"], anchors: Anchors, t: int) -> Spans:
    """Return the context rows that each of the m*t slots sees: its document's, strictly before its anchor (law 5).

    Blocks of anchors that are not valid see nothing but themselves.
    """
    last = jnp.repeat(jnp.where(anchors.valid, anchors.positions, 0), t, axis=1)
    first = jnp.repeat(jnp.take_along_axis(starts, anchors.positions, axis=1), t, axis=1)
    if layer.window is not None:
        slots = masks.positions(anchors.positions.reshape(-1), t).reshape(last.shape)
        first = jnp.maximum(first, slots - layer.window + 1)
    return Spans(jnp.minimum(first, last), last)


def row_spans(layer: LayerConfig, starts: Int[Array, "b s"]) -> Spans:
    """Return the rows that each position of the target sees: its document's, up to itself."""
    rows = jnp.broadcast_to(jnp.arange(starts.shape[1], dtype=starts.dtype)[None], starts.shape)
    first = starts if layer.window is None else jnp.maximum(starts, rows - layer.window + 1)
    return Spans(first, rows + 1)
