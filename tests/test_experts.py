"""The expert layer: what it computes, on one device and on eight, and that decoding with it is lossless."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import sharding
from dflash_jax.config import ExpertsConfig, LayerConfig
from dflash_jax.errors import UserError
from dflash_jax.experts import choose, mix
from inference.engine import SamplingConfig
from tests import processes, tiny

EXPERTS = ExpertsConfig(count=5, chosen=2, intermediate_size=8, normalised=True)
TARGET = dataclasses.replace(
    tiny.TARGET,
    family="qwen3_moe",
    layers=tuple(LayerConfig(tiny.ROTARY, experts=None if i == 1 else EXPERTS) for i in range(4)),
)


def one_by_one(x, chosen, shares, gate, up, down):
    """Each token through each of its experts, in float64."""
    out = np.zeros(x.shape)
    for b, t in np.ndindex(*x.shape[:2]):
        for expert, share in zip(chosen[b, t], shares[b, t], strict=True):
            g, u = x[b, t] @ gate[expert], x[b, t] @ up[expert]
            out[b, t] += share * ((g / (1 + np.exp(-g)) * u) @ down[expert])
    return out


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_tokens_go_through_their_experts_alone(seed, b, t, count, data):
    k = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    x, shares = rng.standard_normal((b, t, 6)), rng.random((b, t, k))
    gate, up, down = (rng.standard_normal((count, *size)) for size in ((6, 3), (6, 3), (3, 6)))
    chosen = np.argsort(rng.random((b, t, count)), axis=-1)[..., :k]
    inputs = [jnp.asarray(array, jnp.float32) for array in (x, shares, gate, up, down)]
    found = mix(inputs[0], jnp.asarray(chosen, jnp.int32), *inputs[1:])
    np.testing.assert_allclose(found, one_by_one(x, chosen, shares, gate, up, down), atol=1e-4)


def test_the_likeliest_are_chosen_and_share_what_there_is():
    logits = jnp.log(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]))
    config = ExpertsConfig(count=4, chosen=2, intermediate_size=1, normalised=True)
    chosen, shares = choose(logits, config)
    assert chosen.tolist() == [[[1, 3]]]
    np.testing.assert_allclose(shares, [[[4 / 7, 3 / 7]]], rtol=1e-6)
    _, shares = choose(logits, dataclasses.replace(config, normalised=False))
    np.testing.assert_allclose(shares, [[[0.4, 0.3]]], rtol=1e-6)
    assert choose(logits.astype(jnp.bfloat16), config)[1].dtype == jnp.bfloat16


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(TARGET, batch_size=3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_a_draft_changes_no_token(engine, sampling):
    asked = SamplingConfig(max_new_tokens=40, **sampling)
    prompts = tiny.prompts(7, seed=1)
    drafted, plain = engine.generate(prompts, asked), engine.generate(prompts, asked, False)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert any(max(one.emitted_per_block) > 1 for one in drafted)


def test_eight_devices_do_as_one(tmp_path):
    [status], _, [told] = processes.run(1, 8, "tests.experts_worker", str(tmp_path / "found.json"))
    assert status == 0, told
    found = json.loads((tmp_path / "found.json").read_text())
    np.testing.assert_allclose(found["trained"]["eight"], found["trained"]["one"], atol=2e-5)
    assert found["decoded"]["eight"] == found["decoded"]["one"]
    # No weights of experts move while decoding: a layer's have 3 * 5 * 16 * 8 elements.
    assert found["exchanged"]["decode"] < 5 * 16 * 8
    # A device has its part of every expert's columns.
    assert found["parts"] == [[5, 16, 8 // 4], [5, 8 // 4, 16]]


def test_an_expert_is_not_split_unevenly():
    mesh = jax.sharding.AbstractMesh((1, 1, 3), sharding.AXES)
    config = dataclasses.replace(TARGET, num_heads=3, num_kv_heads=3, vocab_size=12, intermediate_size=24)
    with pytest.raises(UserError, match="tensor=3 does not divide 8 columns of an expert"):
        sharding.check_mesh(mesh, config)
