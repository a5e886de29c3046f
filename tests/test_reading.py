import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import parameters, reading, sharding
from dflash_jax.config import LayerConfig
from tests import tiny
from tests.torch_models import random_params

MESH = sharding.make_mesh()
WINDOW = LayerConfig(tiny.ROTARY, window=5)


def with_layers(*kinds):
    return dataclasses.replace(tiny.TARGET, layers=kinds)


FULL = tiny.TARGET.layers[0]


@pytest.mark.parametrize(
    ("kinds", "taps", "through", "cut"),
    [
        ((FULL,) * 6, (1, 3), False, [(0, 2), (2, 4)]),
        ((FULL,) * 6, (1, 3), True, [(0, 2), (2, 4), (4, 6)]),
        ((FULL,) * 6, (0,), False, [(0, 1)]),
        ((FULL,) * 4, (3, 1), True, [(0, 2), (2, 4)]),
        ((FULL, FULL, WINDOW, WINDOW, FULL), (3,), True, [(0, 2), (2, 4), (4, 5)]),
        ((FULL, FULL, WINDOW, WINDOW, FULL), (4,), False, [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_layers_are_cut_after_taps_and_where_they_change(kinds, taps, through, cut):
    assert [(part.start, part.stop) for part in reading.stacks(with_layers(*kinds), taps, through)] == cut


def test_stacking_takes_the_layers_over_and_leaves_out_what_is_not_run():
    params = random_params(tiny.TARGET, 0)
    before = jax.tree.map(np.asarray, params)
    stacked = reading.stack(MESH, tiny.TARGET, (0, 2), params, through=False)
    assert sorted(stacked) == ["embedding", "head", "stack_0", "stack_1"]
    assert sorted(params) == ["embedding", "final_norm", "head", "layers_3"]
    both = [before[f"layers_{i}"]["mlp"]["up_proj"]["kernel"] for i in (1, 2)]
    assert (stacked["stack_1"]["mlp"]["up_proj"]["kernel"] == np.stack(both)).all()


def test_a_stack_lies_as_its_layers_do_whatever_the_mesh():
    mesh = jax.sharding.AbstractMesh((1, 2, 2), sharding.AXES)
    shapes = jax.eval_shape(
        lambda params: reading.stack(mesh, tiny.TARGET, (0, 2), params, through=True), parameters.shapes(tiny.TARGET)
    )
    place = sharding.shardings(mesh, shapes)["stack_1"]["attention"]["o_proj"]["kernel"]
    assert place.spec == jax.sharding.PartitionSpec(None, "tensor", "fsdp")
    assert sharding.shardings(mesh, shapes)["stack_0"]["mlp_norm"]["scale"].spec == jax.sharding.PartitionSpec(None)


def test_taps_come_in_the_order_that_is_asked_for():
    tokens, starts = jnp.arange(8, dtype=jnp.int32)[None], jnp.zeros((1, 8), jnp.int32)

    def features(*taps):
        weights = reading.stack(MESH, tiny.TARGET, taps, random_params(tiny.TARGET, 0), through=False)
        return reading.read(tiny.TARGET, taps, weights, tokens, starts, through=False)[0]

    d = tiny.TARGET.hidden_size
    one, other = features(0, 2), features(2, 0)
    np.testing.assert_allclose(one[..., :d], other[..., d:], atol=1e-6)
    np.testing.assert_allclose(one[..., d:], other[..., :d], atol=1e-6)
    assert float(abs(one - other).max()) > 0.1
