from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dflash_jax import cache, parameters
from dflash_jax.config import LayerConfig, TargetConfig
from dflash_jax.rope import Rotary, angles
from dflash_jax.target import Target, TargetLayer
from tests.torch_models import TARGETS, empty, hf_target, run_target, tokens

pytestmark = pytest.mark.usefixtures("strict_dtypes")
LENGTH = 24  # beyond the original contexts of the scaled rotary settings, and beyond the window


@torch.no_grad()
def _reference(model: torch.nn.Module, ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    out = model(torch.tensor(ids), output_hidden_states=True, use_cache=False)
    return [state.numpy() for state in out.hidden_states], out.logits.numpy()


@pytest.mark.parametrize("name", TARGETS)
def test_every_layer_and_the_logits_match_transformers(name):
    model, config, params = hf_target(name)
    ids = tokens(2, LENGTH)
    states, expected = _reference(model, ids)
    hidden, taps, logits, _ = run_target(config, params, ids)
    per_layer = np.split(taps, config.num_layers, axis=-1)
    for i in range(config.num_layers - 1):
        np.testing.assert_allclose(per_layer[i], states[i + 1], atol=2e-5, err_msg=f"output of layer {i}")
    np.testing.assert_allclose(hidden, states[-1], atol=2e-5)  # transformers' last entry is after the final norm
    np.testing.assert_allclose(logits, expected, atol=5e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_the_tree_of_shapes_is_that_of_the_torch_weights(name):
    _, config, params = hf_target(name)
    assert jax.tree.map(jnp.shape, parameters.shapes(config)) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding", "llama3-biased"])
@pytest.mark.parametrize("chunks", [(8, 8, 8), (1,) * LENGTH], ids=["chunks", "tokens"])
def test_prefill_in_pieces_equals_prefill_in_one(name, chunks):
    _, config, params = hf_target(name)
    ids = tokens(2, LENGTH)
    whole = run_target(config, params, ids)
    pieces = run_target(config, params, ids, chunks)
    for one, many in zip(whole[:3], pieces[:3], strict=True):
        np.testing.assert_allclose(many, one, atol=2e-5)


def test_layers_that_are_alike_are_traced_once(monkeypatch):
    _, config, params = hf_target("qwen3-sliding")
    traced = []
    transform = TargetLayer.transform

    def told(self, x):
        traced.append(self.layer)
        return transform(self, x)

    monkeypatch.setattr(TargetLayer, "transform", told)
    jax.eval_shape(Target(config).apply, {"params": params}, tokens(2, 8), empty(config, 2), np.zeros(2, np.int32))
    assert len(traced) == len(set(traced)) == len(set(config.layers)) < config.num_layers


def test_rows_that_start_at_different_positions_do_not_disturb_one_another():
    _, config, params = hf_target("qwen3-sliding")
    ids = tokens(2, LENGTH)
    _, _, whole, filled = run_target(config, params, ids)
    # Both rows are rewound by arithmetic alone (law 9), to different lengths; what lies past those is now rubbish.
    starts = (6, 15)
    again = np.stack([ids[row, start : start + 5] for row, start in enumerate(starts)])
    _, _, logits, _ = run_target(config, params, again, starts=starts, buffers=filled)
    for row, start in enumerate(starts):
        np.testing.assert_allclose(logits[row], whole[row, start : start + 5], atol=2e-5)


def _adding_constants() -> tuple[TargetConfig, dict]:
    """Layer l adds l + 1 to every hidden value, by the bias of its last projection; all else is zero."""
    config = TargetConfig(
        vocab_size=7,
        hidden_size=4,
        intermediate_size=6,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        max_positions=16,
        layers=(LayerConfig(Rotary(theta=1e4)),) * 4,
        qk_norm=False,
        mlp_bias=True,
        family="llama",
    )
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), parameters.shapes(config))
    for i in range(4):
        params[f"layers_{i}"]["mlp"]["down_proj"]["bias"] = jnp.full(4, i + 1.0)
    return config, params


@pytest.mark.parametrize(("taps", "values"), [((0,), [1]), ((0, 1, 2, 3), [1, 3, 6, 10]), ((2, 1), [6, 3]), ((), [])])
def test_a_tap_is_the_output_of_its_layer(taps, values):
    config, params = _adding_constants()
    start = jnp.zeros(1, jnp.int32)
    ids = jnp.zeros((1, 2), jnp.int32)
    outputs: Any = jax.jit(Target(config, taps).apply)({"params": params}, ids, empty(config, 1), start)
    np.testing.assert_array_equal(outputs[1], np.repeat(np.array(values, np.float32), 4)[None, None].repeat(2, 1))


def test_the_final_norm_scales_the_logits_but_no_tap():
    model, config, params = hf_target("qwen3")
    ids = tokens(1, 6)
    states, expected = _reference(model, ids)
    model.model.norm.weight.data *= 3
    params["final_norm"]["scale"] *= 3
    tripled_states, tripled = _reference(model, ids)
    _, taps, logits, _ = run_target(config, params, ids)
    np.testing.assert_allclose(tripled, 3 * expected, atol=1e-5)
    np.testing.assert_allclose(logits, 3 * expected, atol=1e-4)
    np.testing.assert_allclose(taps[..., : config.hidden_size], states[1], atol=2e-5)
    np.testing.assert_array_equal(tripled_states[1], states[1])


def test_float64_is_never_narrowed(float64, monkeypatch):
    """Transformers norms in float32 even so; with that undone, and our float32 angles, it is a float64 yardstick."""
    model, config, params = hf_target("qwen3-sliding")
    model = model.double()
    ids = tokens(2, LENGTH)

    def exact_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def our_angles(self: torch.nn.Module, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = angles(config.layers[0].rotary, config.head_dim, jnp.asarray(positions.numpy(), jnp.int32))
        cos, sin = (torch.tensor(np.asarray(half)).double() for half in halves)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward", exact_norm)
    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding.forward", our_angles)
    _, expected = _reference(model, ids)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    hidden, taps, logits, filled = run_target(config, params, ids)
    assert {x.dtype for x in (hidden, taps, logits, filled[0].keys)} == {np.dtype("float64")}
    np.testing.assert_allclose(logits, expected, atol=1e-12)


def test_bfloat16_weights_give_float32_logits_near_the_exact_ones():
    _, config, params = hf_target("qwen3")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    ids = tokens(2, LENGTH)
    _, taps, logits, filled = run_target(config, narrow, ids)
    assert logits.dtype == np.float32
    assert taps.dtype == filled[0].keys.dtype == jnp.bfloat16
    expected = run_target(config, rounded, ids)[2]
    assert np.abs(logits - expected).mean() < 0.01 * np.abs(expected).max()
    # The head's product itself is not rounded to bfloat16's 8 bits.
    assert (logits != logits.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.9


def test_initial_parameters_are_float32_also_where_float64_is_on(float64):
    config = hf_target("llama3-biased")[1]
    assert {x.dtype for x in jax.tree.leaves(parameters.shapes(config))} == {np.dtype("float32")}


def test_the_embedding_serves_drafts_too():
    _, config, params = hf_target("qwen3-tied")
    rows = Target(config).apply({"params": params}, jnp.array([[3, 60]]), method="embed")
    np.testing.assert_array_equal(rows[0], params["embedding"][np.array([3, 60])])


def test_a_cache_of_too_few_layers_raises():
    _, config, params = hf_target("qwen3")
    short = cache.empty(config, 1, 8, jnp.dtype("float32"))[:-1]
    with pytest.raises(ValueError, match="zip"):
        run_target(config, params, tokens(1, 1), buffers=short)
