import contextlib
import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from dflash_jax import attention_kernel, block_attention, sharding
from dflash_jax.anchors import Anchors, block_spans
from dflash_jax.block_attention import Own, Spans, attend_spans
from dflash_jax.config import LayerConfig
from dflash_jax.errors import UserError
from dflash_jax.rope import Rotary
from tests.test_block_attention import dense, inputs
from training import machines, plan

QUERIES, KEYS = 16, 8


@contextlib.contextmanager
def small_tiles():
    """Several tiles and pieces in little time; kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "QUERIES", QUERIES)
        for module in (block_attention, attention_kernel):
            patch.setattr(module, "KEYS", KEYS)
        for name in ("forward", "backward"):
            kernel = functools.partial(getattr(attention_kernel, name), interpret=True)
            patch.setattr(attention_kernel, name, kernel)
        yield


@pytest.fixture
def _kernels(monkeypatch):
    """Attention by the kernels, whatever the shapes."""
    monkeypatch.setattr(attention_kernel, "suits", lambda *_: True)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, tpu, default: tpu(*arguments))
    with small_tiles():
        yield


def gradients(function, arrays, spans, own, weights):
    """Return what attention gives, and what its inputs get of it."""

    def run(arrays, mine):
        theirs = own._replace(keys=mine[0], values=mine[1]) if own else None
        return function(*arrays, spans, theirs)

    out, back = jax.vjp(run, arrays, (own.keys, own.values) if own else ())
    return out, back(weights)


def assert_same(ours, theirs, atol):
    def close(one, other):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=atol)

    jax.tree.map(close, ours, theirs)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("q", "s", "t"), [(20, 21, 4), (12, 40, 3), (5, 7, 5), (48, 8, 16), (34, 24, 2)])
def test_values_and_gradients_are_those_of_a_dense_mask(q, s, t):
    given = inputs(q, q, s, t)
    ours, theirs = (jax.jit(functools.partial(gradients, function))(*given) for function in (attend_spans, dense))
    assert_same(ours, theirs, 5e-6)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("q", "s"), [(21, 21), (9, 40)])
def test_a_row_over_itself_needs_no_blocks(q, s):
    arrays, spans, _, weights = inputs(q, q, s, 0)
    spans = spans._replace(last=jnp.maximum(spans.last, spans.first + 1))  # each sees something
    given = arrays, spans, None, weights
    ours, theirs = (jax.jit(functools.partial(gradients, function))(*given) for function in (attend_spans, dense))
    assert_same(ours, theirs, 5e-6)


@pytest.mark.usefixtures("_kernels")
def test_bfloat16_rounds_once_a_product():
    wide = inputs(3, 32, 30, 4)
    arrays, spans, own, weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, wide)
    ours = jax.jit(functools.partial(gradients, attend_spans))(arrays, spans, own, weights)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(ours))
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (arrays, own, weights))
    theirs = jax.jit(functools.partial(gradients, dense))(rounded[0], spans, *rounded[1:])
    assert_same(ours, theirs, 0.04)


@pytest.mark.usefixtures("_kernels")
def test_queries_that_see_nothing_get_zeros_among_others_that_see():
    (queries, keys, values), spans, _, weights = inputs(1, 20, 30, 0)
    blind = np.arange(20)[None] % 3 == 0
    spans = Spans(jnp.where(blind, 7, 0 * spans.first), jnp.where(blind, 7, 9 + 0 * spans.last))
    run = jax.jit(functools.partial(gradients, attend_spans))
    out, ((d_queries, *_), _) = run((queries, keys, values), spans, None, weights)
    shown = np.broadcast_to(blind[:, None, :, None], out.shape)
    for one in (out, d_queries):
        assert (one[shown] == 0).all()
        assert (one[~shown] != 0).all()


@settings(max_examples=15)
@given(data=st.data())
def test_blocks_of_documents_are_as_by_tiles(data):
    """Logarithms too: windows, several documents a row, anchors that are not valid, lengths that fill no tile."""
    t, s, m = data.draw(st.sampled_from([(2, 40, 9), (4, 21, 5), (8, 9, 4)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    starts = np.maximum.accumulate(np.where(rng.random((2, s)) < 0.1, np.arange(s)[None], 0), axis=1)
    anchors = Anchors(
        jnp.asarray(np.sort(rng.integers(0, s, (2, m)), axis=1), jnp.int32), jnp.asarray(rng.random((2, m)) < 0.8)
    )
    layer = LayerConfig(Rotary(1e4), window=data.draw(st.sampled_from([None, 5, 20])))
    spans = block_spans(layer, jnp.asarray(starts, jnp.int32), anchors, t)
    arrays, _, own, weights = inputs(s, m * t, s, t)
    own = own._replace(within=jnp.asarray(rng.random((t, t)) < 0.7) | jnp.eye(t, dtype=bool))
    theirs = by_tiles(arrays, spans, own, weights)
    assert_same(by_kernel(arrays, spans, own, theirs[0], weights), theirs, 5e-6)


@jax.jit
def by_tiles(arrays, spans, own, weights):
    """Return what is mixed and the logarithms, and gradients, in plain tiles."""
    with small_tiles():
        attended: Any = *arrays, spans, own
        found: Any = block_attention._by_tiles(*attended)
        return found, block_attention._gradients_by_tiles(block_attention._Residuals(*attended, *found), weights)


@jax.jit
def by_kernel(arrays, spans, own, found, weights):
    """Return the same by the kernels, gradients from what plain tiles found."""
    with small_tiles():
        attended: Any = *arrays, spans, own
        ours = block_attention._by_kernel(*attended)
        return ours, block_attention._gradients_by_kernel(block_attention._Residuals(*attended, *found), weights)


@pytest.mark.usefixtures("_kernels")
def test_pieces_that_no_query_of_a_tile_sees_are_not_touched():
    arrays, _, own, weights = inputs(5, 32, 40, 4)
    # Tiles of 16 queries, pieces of 8 rows: the first sees pieces 0 and 1, the second piece 2, or none at all.
    last = jnp.repeat(jnp.asarray([[9, 20], [14, 0]], jnp.int32), 16, axis=1)
    first = jnp.repeat(jnp.asarray([[2, 17], [0, 0]], jnp.int32), 16, axis=1)
    run = jax.jit(functools.partial(gradients, attend_spans))
    queries, keys, values = arrays
    out, ((d_queries, d_keys, d_values), d_own) = run(arrays, Spans(first, last), own, weights)
    seen = np.zeros((2, 1, 40, 1), bool)
    seen[0, :, :24], seen[1, :, :16] = True, True
    rubbish = tuple(jnp.where(seen, x, jnp.nan) for x in (keys, values))
    again = run((queries, *rubbish), Spans(first, last), own, weights)
    jax.tree.map(np.testing.assert_array_equal, again, (out, ((d_queries, d_keys, d_values), d_own)))
    assert not np.where(seen, 0.0, d_keys).any()


def test_works_are_tiles_by_the_pieces_that_they_see():
    edges = [
        [[0, 4], [0, 0], [6, 9], [3, 3]],
        [[8, 12], [0, 12], [1, 2], [2, 3]],
    ]  # two queries a tile, four rows a piece
    first, last = jnp.moveaxis(jnp.asarray(edges, jnp.int32), 2, 0)
    queries, keys = jnp.zeros((2, 1, 4, 8)), jnp.zeros((2, 1, 12, 8))
    at = attention_kernel._Sizes(b=2, k=1, group=1, tiles=2, size=2, pieces=3, piece=4, h=8)
    works, count = attention_kernel._works(
        attention_kernel.Inputs(queries, keys, keys, first, last, None, None, None), at
    )
    assert works.first.tolist() == [0, 1, 0, 0]
    assert works.last.tolist() == [1, 3, 3, 1]
    assert count == 7
    assert works.tiles[:7].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert works.pieces[:7].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("n", "k", "h", "s", "dtype", "size", "suits"),
    [
        (32, 8, 128, 3072, "bfloat16", 256, True),
        (32, 8, 128, 3072, "float32", 240, True),
        (32, 8, 128, 16384, "bfloat16", 256, True),
        (32, 8, 128, 16385, "bfloat16", 256, False),  # a row's gradients do not fit
        (32, 8, 64, 3072, "bfloat16", 256, False),  # half a line
        (32, 8, 128, 3072, "bfloat16", 250, False),  # cut within lines that lie together
        (64, 2, 128, 3072, "bfloat16", 256, False),  # too many scores, even of the smallest piece
        (32, 8, 128, 3072, "float16", 256, False),
    ],
)
def test_what_suits(n, k, h, s, dtype, size, suits):
    queries, keys = (jax.ShapeDtypeStruct((1, *shape, h), jnp.dtype(dtype)) for shape in ((n, 8192), (k, s)))
    assert attention_kernel.suits(queries, keys, size) is suits


@pytest.mark.parametrize(("block", "size"), [(16, 256), (10, 240), (8, 256), (7, 224), (1, 256), (48, 240), (17, 255)])
def test_tiles_are_whole_blocks_by_sixteens_where_they_can_be(block, size):
    queries, own = jnp.zeros((1, 1, 1000, 1)), jnp.zeros((1, 1, 1000, 1))
    within = jnp.ones((block, block), bool)
    assert block_attention._tile_size(queries, Own(own, own, within)) == size


@pytest.mark.parametrize(
    ("platform", "head", "kernels"), [("tpu", 128, 2), ("tpu", 64, 0), ("cuda", 128, 0), ("cpu", 128, 0)]
)
def test_only_tpus_get_kernels_and_only_for_what_suits(platform, head, kernels):
    mesh: Any = AbstractMesh((1, 2, 2), sharding.AXES)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    own = Own(shape(2, 2, 64, head), shape(2, 2, 64, head), shape(16, 16, dtype=jnp.bool))
    spans = Spans(*[shape(2, 64, dtype=jnp.int32)] * 2)
    arrays = shape(2, 4, 64, head), *[shape(2, 2, 100, head)] * 2
    with sharding.traced_on(mesh):
        traced = jax.jit(functools.partial(gradients, attend_spans)).trace(arrays, spans, own, arrays[0])
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call") == kernels


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5p-8", "v6e-8"])
def test_kernels_compile_and_need_little_beside_their_results(machine):
    try:
        plan.check_packages(machines.find(machine))
    except UserError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "benchmarks.attention", "--one", machine]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert found["kernels"]["kernels"] == 2
    assert found["tiles"]["kernels"] == 0
    assert found["kernels"]["temporaries"] < 0.1 * found["tiles"]["temporaries"]
