"""The tiles of `block_attention` as kernels for TPUs: what no query of a tile sees is neither fetched nor waited for.

A kernel runs over a list of works, each of them a tile of queries and a piece of the context that some of them see, so
its length follows from the spans. Scores lie with keys first, [s, m], so that one number a query is one line.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.layers import EXACT

# Scores of a work, and context rows of a piece, at most.
SCORES, KEYS = 2**19, 512
# What a kernel may take of a core's memory, 64 MiB on a TPU v5p, and what a row's gradients may take of that.
MEMORY, GRADIENTS = 56 * 2**20, 32 * 2**20
# Rows of bfloat16, and numbers of a line, that lie together.
SUBLANES, LANES = 16, 128
WIDE = jnp.float32
LOWEST, LEAST = np.finfo(WIDE).min.item(), np.finfo(WIDE).tiny.item()


class Inputs(NamedTuple):
    """Queries in whole tiles, the context in whole pieces, and what is seen of it: first ≤ row < last.

    Own keys, where there are, are cut as queries are; the mask says which query of a tile, down, sees which of them.
    """

    queries: Float[Array, "b n q h"]
    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    first: Int[Array, "b q"]
    last: Int[Array, "b q"]
    own_keys: Float[Array, "b k q h"] | None
    own_values: Float[Array, "b k q h"] | None
    mask: Bool[Array, "t t"] | None


class _Works(NamedTuple):
    """Each work's tile and piece, tile by tile, and each tile's first piece and the one after its last.

    Tiles are counted through all rows of the batch. One that sees nothing of the context has a work all the same.
    """

    tiles: Any
    pieces: Any
    first: Any
    last: Any


class _Sizes(NamedTuple):
    """Rows, key heads, query heads of each, tiles of a row, queries of a tile, pieces, rows of a piece, head size."""

    b: int
    k: int
    group: int
    tiles: int
    size: int
    pieces: int
    piece: int
    h: int

    @property
    def line(self) -> int:
        """Queries that meet a key head in a tile, m."""
        return self.group * self.size


class _Array(NamedTuple):
    """What a kernel reads or writes: an array, or its shape; the part that a work needs of it, and which one."""

    whole: Any
    part: tuple[int | None, ...]
    index: Callable[..., Any]

    @property
    def spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(self.part, self.index)


def suits(queries: Any, keys: Any, size: int) -> bool:
    """Say whether the kernels take arrays like these, in tiles of `size` queries."""
    h, width = queries.shape[3], queries.dtype.itemsize
    return (
        queries.dtype == keys.dtype
        and queries.dtype in (jnp.bfloat16, jnp.float32)
        and h % LANES == 0
        and size % SUBLANES == 0
        and piece_size(queries, keys, size) > 0
        and keys.shape[2] * h * (8 + 4 * width) <= GRADIENTS
    )


def piece_size(queries: Any, keys: Any, size: int) -> int:
    """Return how many context rows make a piece."""
    return min(KEYS, SCORES // (queries.shape[1] // keys.shape[1] * size) // LANES * LANES)


def forward(inputs: Inputs, size: int, *, interpret: bool = False) -> tuple[Array, Array]:
    """Attend.

    Args:
        inputs: whole tiles and pieces.
        size: queries of a tile.
        interpret: run without a TPU, slowly.

    Returns:
        What is mixed, [b, n, q, h], and the logarithm of all weights, [tiles, b, k, m, 1], in float32.
    """
    at = _sizes(inputs, size)
    outputs = [
        _queries(at, _shape(inputs.queries.shape, inputs.queries.dtype)),
        _by_tile(at, _shape((at.tiles, at.b, at.k, 1, at.line), WIDE)),
    ]
    scratch = (1, at.line), (1, at.line), (at.h, at.line)
    mixed, logs = _call(_forward_work, inputs, at, [], outputs, scratch, interpret)
    return mixed.reshape(inputs.queries.shape), logs.reshape(*logs.shape[:3], at.line, 1)


def backward(
    inputs: Inputs,
    size: int,
    cotangent: Float[Array, "b n q h"],
    logs: Float[Array, "tiles b k m 1"],
    inner: Float[Array, "tiles b k m 1"],
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return what queries, keys and values get, and then own keys and values where there are.

    Args:
        inputs: whole tiles and pieces.
        size: queries of a tile.
        cotangent: what the mixed values get.
        logs: as `forward` returns them.
        inner: each query's product of what it mixed and the cotangent.
        interpret: run without a TPU, slowly.
    """
    at = _sizes(inputs, size)
    others = [_queries(at, cotangent), *(_by_tile(at, x.reshape(*x.shape[:3], 1, at.line)) for x in (logs, inner))]
    like = _shape(inputs.keys.shape, inputs.keys.dtype)
    context = _Array(like, (None, None, *like.shape[2:]), lambda k, work, tiles, *_: (_row(at, tiles[work]), k, 0, 0))
    outputs = [_queries(at, _shape(cotangent.shape, cotangent.dtype)), context, context]
    if inputs.own_keys is not None:
        outputs += [_own(at, _shape(inputs.own_keys.shape, inputs.own_keys.dtype))] * 2
    scratch = (at.h, at.line), like.shape[2:], like.shape[2:]
    d_queries, *rest = _call(_backward_work, inputs, at, others, outputs, scratch, interpret)
    return d_queries.reshape(cotangent.shape), *rest


def _call(
    kernel: Callable[..., None],
    inputs: Inputs,
    at: _Sizes,
    others: list[_Array],
    outputs: list[_Array],
    scratch: tuple[tuple[int, ...], ...],
    interpret: bool,
) -> Any:
    """Run a kernel's works, for one key head after the other."""
    works, count = _works(inputs, at)
    arrays = _arrays(inputs, at) + others
    return pl.pallas_call(
        functools.partial(kernel, at, inputs.mask is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(works),
            grid=(at.k, count),
            in_specs=[array.spec for array in arrays],
            out_specs=[array.spec for array in outputs],
            scratch_shapes=[pltpu.VMEM(shape, WIDE) for shape in scratch],
        ),
        out_shape=[array.whole for array in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MEMORY),
        cost_estimate=_cost(at, arrays + outputs, 2 if kernel is _forward_work else 5, inputs.mask is not None),
        interpret=interpret,
        name=f"attention{kernel.__name__}",
    )(*works, *(array.whole for array in arrays))


def _cost(at: _Sizes, arrays: list[_Array], products: int, own: bool) -> pl.CostEstimate:
    """Return what a kernel costs where a query sees half of the context's pieces, as it does in the mean."""
    seen = at.pieces * at.piece // 2
    scores = at.b * at.k * at.tiles * at.line * (seen + own * at.size)
    once = sum(array.whole.size * array.whole.dtype.itemsize for array in arrays)
    again = at.b * at.k * (at.tiles * seen - at.pieces * at.piece) * at.h * 2 * arrays[1].whole.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * products * scores * at.h, transcendentals=scores, bytes_accessed=once + max(again, 0)
    )


def _sizes(inputs: Inputs, size: int) -> _Sizes:
    b, n, q, h = inputs.queries.shape
    k, s = inputs.keys.shape[1:3]
    piece = piece_size(inputs.queries, inputs.keys, size)
    return _Sizes(b, k, n // k, q // size, size, s // piece, piece, h)


def _works(inputs: Inputs, at: _Sizes) -> tuple[_Works, Array]:
    """Return room for all works that there could be, and how many there are."""
    sees = inputs.first < inputs.last
    first = jnp.where(sees, inputs.first, np.iinfo(np.int32).max).reshape(-1, at.size).min(axis=1) // at.piece
    last = -(-jnp.where(sees, inputs.last, 0).reshape(-1, at.size).max(axis=1) // at.piece)
    first = jnp.minimum(first, last)  # a tile that sees nothing: 0, 0
    counts = jnp.maximum(last - first, 1)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    works = jnp.arange(at.b * at.tiles * at.pieces, dtype=jnp.int32)
    tiles = (works[:, None] >= ends[None]).sum(axis=1, dtype=jnp.int32)  # past the count: one more than there are
    pieces = works - (ends - counts - first)[jnp.minimum(tiles, at.b * at.tiles - 1)]
    return _Works(tiles, pieces, first, last), ends[-1]


def _arrays(inputs: Inputs, at: _Sizes) -> list[_Array]:
    """Return what both kernels read: queries, keys, values, spans, and own keys, values and mask where there are."""

    def piece(array: Array) -> _Array:
        def index(k: Any, work: Any, tiles: Any, pieces: Any, *_: Any) -> Any:
            return _row(at, tiles[work]), k, pieces[work], 0

        return _Array(array, (None, None, at.piece, at.h), index)

    def spans(k: Any, work: Any, tiles: Any, *_: Any) -> Any:  # noqa: ARG001
        return _spot(at, tiles[work]), _row(at, tiles[work]), 0, 0

    edges = jnp.stack([inputs.first, inputs.last], axis=1).reshape(at.b, 2, at.tiles, at.size)
    lines = jnp.tile(edges.transpose(2, 0, 1, 3), (1, 1, 1, at.group))
    arrays = [
        _queries(at, inputs.queries),
        piece(inputs.keys),
        piece(inputs.values),
        _Array(lines, (None, None, 2, at.line), spans),
    ]
    if inputs.mask is None:
        return arrays
    mask = jnp.tile(inputs.mask.T.astype(jnp.int32), (1, at.group))
    return [
        *arrays,
        _own(at, inputs.own_keys),
        _own(at, inputs.own_values),
        _Array(mask, mask.shape, lambda *_: (0, 0)),
    ]


def _queries(at: _Sizes, array: Any) -> _Array:
    """Cut what belongs to queries, [b, n, q, h], as it lies."""
    shape = at.b, at.k, at.group, at.tiles * at.size, at.h
    whole = _shape(shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else array.reshape(shape)

    def index(k: Any, work: Any, tiles: Any, *_: Any) -> Any:
        return _row(at, tiles[work]), k, 0, _spot(at, tiles[work]), 0

    return _Array(whole, (None, None, at.group, at.size, at.h), index)


def _own(at: _Sizes, array: Any) -> _Array:
    """Cut what belongs to own keys, [b, k, q, h], as it lies."""

    def index(k: Any, work: Any, tiles: Any, *_: Any) -> Any:
        return _row(at, tiles[work]), k, _spot(at, tiles[work]), 0

    return _Array(array, (None, None, at.size, at.h), index)


def _by_tile(at: _Sizes, array: Any) -> _Array:
    """Take what is cut already, [tiles, b, k, ...]."""
    rest = array.shape[3:]

    def index(k: Any, work: Any, tiles: Any, *_: Any) -> Any:
        return _spot(at, tiles[work]), _row(at, tiles[work]), k, *(0 for _ in rest)

    return _Array(array, (None, None, None, *rest), index)


def _row(at: _Sizes, tile: Any) -> Any:
    """Return the row of a tile."""
    return jax.lax.div(tile, at.tiles)


def _spot(at: _Sizes, tile: Any) -> Any:
    """Return where in its row a tile stands."""
    return jax.lax.rem(tile, at.tiles)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class _Work:
    """Where a work stands, from the scalars that come before it."""

    def __init__(self, at: _Sizes, tiles: Any, pieces: Any, first: Any, last: Any) -> None:
        work = pl.program_id(1)
        self.tile, self.piece = tiles[work], pieces[work]
        self.begins = self.piece == first[self.tile]
        self.sees = self.piece < last[self.tile]
        self.ends = self.piece + 1 >= last[self.tile]
        self.begins_row = self.begins & (_spot(at, self.tile) == 0)
        self.ends_row = self.ends & (_spot(at, self.tile) == at.tiles - 1)


def _forward_work(at: _Sizes, has_own: bool, *refs: Any) -> None:
    """Add a work's piece to its tile's running softmax."""
    work = _Work(at, *refs[:4])
    queries, keys, values, spans, *rest = refs[4:]
    *own, mixed, logs, highest, weights, sums = rest

    def add(keys: Any, values: Any, visible: Any) -> None:
        shown = jnp.where(visible, _scores(at, keys[...], queries), LOWEST)
        above = jnp.maximum(highest[...], shown.max(axis=0, keepdims=True))
        before = jnp.exp(highest[...] - above)
        shares = jnp.where(visible, jnp.exp(shown - above), 0.0)
        highest[...] = above
        weights[...] = weights[...] * before + shares.sum(axis=0, keepdims=True)
        sums[...] = sums[...] * before + _product(values[...], shares.astype(values.dtype), 0, 0)

    @pl.when(work.begins)
    def _() -> None:
        highest[...] = jnp.full(highest.shape, LOWEST, WIDE)
        weights[...] = jnp.zeros(weights.shape, WIDE)
        sums[...] = jnp.zeros(sums.shape, WIDE)
        if has_own:
            add(own[0], own[1], own[2][...] != 0)

    @pl.when(work.sees)
    def _() -> None:
        add(keys, values, _visible(at, work, spans))

    @pl.when(work.ends)
    def _() -> None:
        total = jnp.maximum(weights[...], LEAST)
        mixed[...] = (sums[...] / total).T.reshape(mixed.shape).astype(mixed.dtype)
        logs[...] = highest[...] + jnp.log(total)


def _backward_work(at: _Sizes, has_own: bool, *refs: Any) -> None:
    """Add what a work's piece and its tile give each other; a row's gradients stay in memory until its last work."""
    work = _Work(at, *refs[:4])
    queries, keys, values, spans, *rest = refs[4:]
    own, rest = (rest[:3], rest[3:]) if has_own else ([], rest)
    cotangent, logs, inner, d_queries, d_keys, d_values, *d_own = rest[:-3]
    query_sums, key_sums, value_sums = rest[-3:]

    def gradients(keys: Any, values: Any, visible: Any) -> tuple[Array, Array]:
        """Return what keys and values get, and add what queries do."""
        shares = jnp.where(visible, jnp.exp(_scores(at, keys[...], queries) - logs[...]), 0.0)
        flat = cotangent[...].reshape(at.line, at.h)
        d_shares = _product(values[...], flat, 1, 1) - inner[...]
        d_scores = (shares * d_shares * at.h**-0.5).astype(keys.dtype)
        query_sums[...] += _product(keys[...], d_scores, 0, 0)
        return (
            _product(d_scores, queries[...].reshape(at.line, at.h), 1, 0),
            _product(shares.astype(keys.dtype), flat, 1, 0),
        )

    @pl.when(work.begins_row)
    def _() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, WIDE)
        value_sums[...] = jnp.zeros(value_sums.shape, WIDE)

    @pl.when(work.begins)
    def _() -> None:
        query_sums[...] = jnp.zeros(query_sums.shape, WIDE)
        if has_own:
            for ref, gradient in zip(d_own, gradients(own[0], own[1], own[2][...] != 0), strict=True):
                ref[...] = gradient.astype(ref.dtype)

    @pl.when(work.sees)
    def _() -> None:
        rows = pl.ds(pl.multiple_of(work.piece * at.piece, at.piece), at.piece)
        for total, gradient in zip(
            (key_sums, value_sums), gradients(keys, values, _visible(at, work, spans)), strict=True
        ):
            total[rows, :] += gradient

    @pl.when(work.ends)
    def _() -> None:
        d_queries[...] = query_sums[...].T.reshape(d_queries.shape).astype(d_queries.dtype)

    @pl.when(work.ends_row)
    def _() -> None:
        d_keys[...] = key_sums[...].astype(d_keys.dtype)
        d_values[...] = value_sums[...].astype(d_values.dtype)


def _visible(at: _Sizes, work: _Work, spans: Any) -> Array:
    """Say which rows of a work's piece each query of its tile sees, [s, m]."""
    rows = work.piece * at.piece + jax.lax.broadcasted_iota(jnp.int32, (at.piece, at.line), 0)
    return (rows >= spans[0:1, :]) & (rows < spans[1:2, :])


def _scores(at: _Sizes, keys: Array, queries: Any) -> Array:
    """Return all scores, [s, m]."""
    return _product(keys, queries[...].reshape(at.line, at.h), 1, 1) * at.h**-0.5


def _product(one: Array, other: Array, axis: int, its: int) -> Array:
    """Multiply matrices along an axis of each, as exactly as their dtype is."""
    precision = EXACT if one.dtype == WIDE else None
    return jax.lax.dot_general(
        one, other, (((axis,), (its,)), ((), ())), precision=precision, preferred_element_type=WIDE
    )
