"""Attention in training: every query sees a span of one row's context, and beside it, in a draft, its own block.

It is cut into tiles under a running softmax, forward and backward: no temporary grows with queries times context, and
pieces of the context that no query of a tile sees are never read.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import attention_kernel, running_softmax, sharding
from dflash_jax.layers import DEAR, EXACT
from dflash_jax.running_softmax import Mix, Segment

# Queries and context rows of a tile.
QUERIES, KEYS = 256, 256


class Spans(NamedTuple):
    """The context rows that each query sees: first ≤ row < last. Law 3's windows and law 5's anchors are both spans."""

    first: Int[Array, "b q"]
    last: Int[Array, "b q"]


class Own(NamedTuple):
    """Keys and values of blocks of t queries each, of which a query sees its own block's, as `within` says."""

    keys: Float[Array, "b k q h"]
    values: Float[Array, "b k q h"]
    within: Bool[Array, "t t"]


class _Tile(NamedTuple):
    """Some of the queries, whole blocks of them, and what belongs to them."""

    queries: Float[Array, "b n q h"]
    spans: Spans
    own: tuple[Float[Array, "b k q h"], Float[Array, "b k q h"]] | None


class _Residuals(NamedTuple):
    """What the backward pass needs: what was attended, what came of it, and the logarithm of all weights."""

    queries: Float[Array, "b n q h"]
    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    spans: Spans
    own: Own | None
    mixed: Float[Array, "b n q h"]
    logs: Float[Array, "tiles b k m 1"]


def attend_spans(
    queries: Float[Array, "b n q h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    spans: Spans,
    own: Own | None,
) -> Float[Array, "b n q h"]:
    """Attend to the context's spans and to the own blocks under one softmax.

    Query head i uses key head i // (n / k). A query that sees nothing at all gets zeros. On a mesh each device attends
    for its own rows and heads, and asks no other which tiles it may skip.
    """
    heads: Any = sharding.TRAINED_HEADS
    blocks = None if own is None else Own(heads, heads, sharding.WHOLE)  # type: ignore[arg-type]
    inputs = heads, heads, heads, sharding.TRAINED_ROWS, blocks
    return sharding.on_own_shards(_attend, inputs, heads)(queries, keys, values, spans, own)


@jax.custom_vjp
def _attend(queries: Array, keys: Array, values: Array, spans: Spans, own: Own | None) -> Array:
    return _forward(queries, keys, values, spans, own)[0]


def _forward(queries: Array, keys: Array, values: Array, spans: Spans, own: Own | None) -> tuple[Array, _Residuals]:
    arguments = queries, keys, values, spans, own
    if attention_kernel.suits(queries, keys, _tile_size(queries, own)):
        found = jax.lax.platform_dependent(*arguments, tpu=_by_kernel, default=_by_tiles)
    else:
        found = _by_tiles(*arguments)
    mixed, logs = checkpoint_name(found, DEAR)
    return mixed, _Residuals(*arguments, mixed, logs)


def _backward(
    residuals: _Residuals, cotangent: Float[Array, "b n q h"]
) -> tuple[Array, Array, Array, None, Own | None]:
    if attention_kernel.suits(residuals.queries, residuals.keys, _tile_size(residuals.queries, residuals.own)):
        found = jax.lax.platform_dependent(residuals, cotangent, tpu=_gradients_by_kernel, default=_gradients_by_tiles)
    else:
        found = _gradients_by_tiles(residuals, cotangent)
    d_queries, d_keys, d_values, *d_own = found
    no_gradient: Any = None
    return d_queries, d_keys, d_values, None, Own(d_own[0], d_own[1], no_gradient) if d_own else None


_attend.defvjp(_forward, _backward)


def _by_kernel(queries: Array, keys: Array, values: Array, spans: Spans, own: Own | None) -> tuple[Array, Array]:
    mixed, logs = attention_kernel.forward(_whole(queries, keys, values, spans, own), _tile_size(queries, own))
    return mixed[:, :, : queries.shape[2]], logs


def _gradients_by_kernel(residuals: _Residuals, cotangent: Array) -> tuple[Array, ...]:
    queries, keys, values, spans, own, mixed, logs = residuals
    size, q, s = _tile_size(queries, own), queries.shape[2], keys.shape[2]
    inner = (cotangent.astype(logs.dtype) * mixed.astype(logs.dtype)).sum(axis=-1, keepdims=True)
    lines = _cut(inner, size).reshape(logs.shape)
    inputs = _whole(queries, keys, values, spans, own)
    d_queries, d_keys, d_values, *d_own = attention_kernel.backward(inputs, size, _padded(cotangent, size), logs, lines)
    return d_queries[:, :, :q], d_keys[:, :, :s], d_values[:, :, :s], *(part[:, :, :q] for part in d_own)


def _whole(queries: Array, keys: Array, values: Array, spans: Spans, own: Own | None) -> attention_kernel.Inputs:
    """Fill everything up to whole tiles and pieces, for the kernels; what fills up sees nothing."""
    size = _tile_size(queries, own)
    piece = attention_kernel.piece_size(queries, keys, size)
    mask = _block_diagonal(own, size)
    first, last = (_padded(edge[:, None, :, None], size)[:, 0, :, 0] for edge in spans)
    return attention_kernel.Inputs(
        _padded(queries, size),
        _padded(keys, piece),
        _padded(values, piece),
        first,
        last,
        _padded(own.keys, size) if own else None,
        _padded(own.values, size) if own else None,
        None if mask is None else mask[0],
    )


def _by_tiles(queries: Array, keys: Array, values: Array, spans: Spans, own: Own | None) -> tuple[Array, Array]:
    context = _padded(keys, KEYS), _padded(values, KEYS)
    mask = _block_diagonal(own, _tile_size(queries, own))

    def attend(_: None, tile: _Tile) -> tuple[None, tuple[Array, Array]]:
        grouped = running_softmax.group(tile.queries, keys.shape[1])
        mix = running_softmax.begin(grouped)
        for segment in _own_segment(tile, mask):
            mix = running_softmax.add(mix, grouped, segment)

        def add(i: Array, mix: Mix) -> Mix:
            return running_softmax.add(mix, grouped, _piece(context, tile.spans, i))

        mix = jax.lax.fori_loop(*_seen(tile.spans), add, mix)
        weights = jnp.maximum(mix.weights, jnp.finfo(mix.weights.dtype).tiny)
        mixed = (mix.values / weights).astype(queries.dtype).reshape(tile.queries.shape)
        return None, (mixed, mix.highest + jnp.log(weights))

    _, (mixed, logs) = jax.lax.scan(attend, None, _tiles(queries, spans, own))
    return _joined(mixed, queries.shape[2]), logs


def _gradients_by_tiles(residuals: _Residuals, cotangent: Array) -> tuple[Array, ...]:
    queries, keys, values, spans, own, mixed, logs = residuals
    context = _padded(keys, KEYS), _padded(values, KEYS)
    mask = _block_diagonal(own, _tile_size(queries, own))
    wide = logs.dtype

    def attend(sums: tuple[Array, ...], parts: tuple[_Tile, Array, Array, Array]) -> tuple[tuple[Array, ...], Any]:
        tile, d_tile, mixed_tile, log = parts
        grouped, d_mixed, mixed = (running_softmax.group(x, keys.shape[1]) for x in (tile.queries, d_tile, mixed_tile))
        inner = (d_mixed.astype(wide) * mixed.astype(wide)).sum(axis=-1, keepdims=True)

        def gradients(segment: Segment) -> tuple[Array, Array, Array]:
            return _segment_gradients(grouped, segment, d_mixed, log, inner)

        d_own = [gradients(segment) for segment in _own_segment(tile, mask)]
        d_queries = d_own[0][0] if d_own else jnp.zeros(grouped.shape, wide)

        def add(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            more, *rows = gradients(_piece(context, tile.spans, i))
            return carry[0] + more, *(_add_rows(total, part, i) for total, part in zip(carry[1:], rows, strict=True))

        d_queries, *rest = jax.lax.fori_loop(*_seen(tile.spans), add, (d_queries, *sums))
        d_queries = d_queries.astype(queries.dtype).reshape(tile.queries.shape)
        return tuple(rest), (d_queries, *(part.astype(keys.dtype) for part in (d_own[0][1:] if d_own else ())))

    zeros = tuple(jnp.zeros(x.shape, wide) for x in context)
    size = _tile_size(queries, own)
    parts = _tiles(queries, spans, own), _cut(cotangent, size), _cut(mixed, size), logs
    (d_keys, d_values), (d_queries, *d_own) = jax.lax.scan(attend, zeros, parts)
    s, q = keys.shape[2], queries.shape[2]
    return (
        _joined(d_queries, q),
        d_keys[:, :, :s].astype(keys.dtype),
        d_values[:, :, :s].astype(values.dtype),
        *(_joined(part, q) for part in d_own),
    )


def _segment_gradients(
    grouped: Float[Array, "b k m h"],
    segment: Segment,
    d_mixed: Float[Array, "b k m h"],
    log: Float[Array, "b k m 1"],
    inner: Float[Array, "b k m 1"],
) -> tuple[Float[Array, "b k m h"], Float[Array, "b k s h"], Float[Array, "b k s h"]]:
    """Return what queries, keys and values of a segment get, in the wide dtype.

    Scores are computed anew, and `log`, the logarithm of all weights, makes probabilities of them.
    """

    def product(axes: str, one: Array, other: Array) -> Array:
        return jnp.einsum(axes, one.astype(grouped.dtype), other, precision=EXACT, preferred_element_type=log.dtype)

    weights = jnp.exp(running_softmax.scores(grouped, segment) - log)
    d_scores = weights * (product("bkmh,bksh->bkms", d_mixed, segment.values) - inner) * grouped.shape[-1] ** -0.5
    return (
        product("bkms,bksh->bkmh", d_scores, segment.keys),
        product("bkms,bkmh->bksh", d_scores, grouped),
        product("bkms,bkmh->bksh", weights, d_mixed),
    )


def _tiles(queries: Array, spans: Spans, own: Own | None) -> _Tile:
    """Cut what belongs to queries into tiles, along a new first axis; what fills the last tile up sees nothing."""
    size = _tile_size(queries, own)
    return _Tile(
        _cut(queries, size),
        Spans(*(_cut(edge[:, None, :, None], size)[:, :, 0, :, 0] for edge in spans)),
        (_cut(own.keys, size), _cut(own.values, size)) if own else None,
    )


def _tile_size(queries: Array, own: Own | None) -> int:
    """Return how many queries make a tile: whole blocks, by sixteens where that is possible, no more than there are."""
    block = own.within.shape[0] if own else 1
    whole = math.lcm(block, attention_kernel.SUBLANES)
    step = whole if whole <= QUERIES else block
    return min(max(QUERIES // step, 1) * step, queries.shape[2])


def _cut(array: Array, size: int) -> Array:
    """Cut axis 2, [b, n, q, h] → [tiles, b, n, size, h]."""
    padded = _padded(array, size)
    b, n, q, h = padded.shape
    return jnp.moveaxis(padded.reshape(b, n, q // size, size, h), 2, 0)


def _joined(tiles: Array, count: int) -> Array:
    """Undo `_cut`."""
    _, b, n, _, h = tiles.shape
    return jnp.moveaxis(tiles, 0, 2).reshape(b, n, -1, h)[:, :, :count]


def _padded(array: Array, size: int) -> Array:
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % size), (0, 0)))


def _block_diagonal(own: Own | None, size: int) -> Array | None:
    """Return who sees whom in a tile of whole blocks, [1, q, q]."""
    if own is None:
        return None
    t = own.within.shape[0]
    blocks = size // t
    same = jnp.repeat(jnp.repeat(jnp.eye(blocks, dtype=bool), t, axis=0), t, axis=1)
    return (same & jnp.tile(own.within, (blocks, blocks)))[None]


def _own_segment(tile: _Tile, mask: Array | None) -> list[Segment]:
    """Return the blocks of a tile, where there are blocks."""
    return [] if tile.own is None or mask is None else [Segment(*tile.own, mask)]


def _seen(spans: Spans) -> tuple[Array, Array]:
    """Return the first piece of the context that a tile's queries see, and the one after the last."""
    sees = spans.first < spans.last
    first = jnp.where(sees, spans.first, jnp.iinfo(np.int32).max).min() // KEYS
    return first, -(-jnp.where(sees, spans.last, 0).max() // KEYS)


def _piece(context: tuple[Array, Array], spans: Spans, i: Array) -> Segment:
    keys, values = (jax.lax.dynamic_slice_in_dim(x, i * KEYS, KEYS, axis=2) for x in context)
    rows = (i * KEYS + jnp.arange(KEYS))[None, None]
    return Segment(keys, values, (rows >= spans.first[..., None]) & (rows < spans.last[..., None]))


def _add_rows(total: Array, part: Array, i: Array) -> Array:
    rows = jax.lax.dynamic_slice_in_dim(total, i * KEYS, KEYS, axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total, rows + part, i * KEYS, axis=2)
