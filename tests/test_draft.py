import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from dflash_jax import parameters
from dflash_jax.cache import Cache
from dflash_jax.config import DraftConfig
from dflash_jax.draft import Draft, adjust_logits
from tests.torch_models import SIZES, YARN, empty, hf_dict, params_of, random_params, randomise

pytestmark = pytest.mark.usefixtures("strict_dtypes")

BLOCK = 4
FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH: dict[str, Any] = {"mask_token_id": 60, "target_layer_ids": [1, 3]}
MIXED: dict[str, Any] = {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 3}


def draft_config(**changes: Any) -> Qwen3Config:
    """Return a tiny draft's config, as transformers holds it; no change means two full-attention layers."""
    own = {"num_hidden_layers": 2, "block_size": BLOCK, "num_target_layers": 6, "dflash_config": DFLASH}
    return Qwen3Config(**SIZES | own | changes)


def ours(hf: Qwen3Config) -> DraftConfig:
    return DraftConfig.from_hf(hf_dict(hf, "DFlashDraftModel"))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _extend(config: DraftConfig, params: Any, features: jax.Array, filled: Cache, start: jax.Array) -> Any:
    return Draft(config).apply({"params": params}, features, filled, start, method="extend")


@functools.partial(jax.jit, static_argnums=0)
def _run(config: DraftConfig, params: Any, block: jax.Array, filled: Cache, start: jax.Array) -> Any:
    return Draft(config).apply({"params": params}, block, filled, start)


def extend(config: DraftConfig, params: Any, features: Any, filled: Cache, start: Any) -> Cache:
    return _extend(config, params, jnp.asarray(features), filled, jnp.asarray(start, jnp.int32))


def run(config: DraftConfig, params: Any, block: Any, filled: Cache, start: Any) -> jax.Array:
    return _run(config, params, jnp.asarray(block), filled, jnp.asarray(start, jnp.int32))


def small(**changes: Any) -> tuple[DraftConfig, Any]:
    """Return a config and random weights; full layers unless told otherwise."""
    config = ours(draft_config(**changes))
    return config, random_params(config)


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": MIXED,
    "full-causal": {"is_causal": True},
    "mixed-causal": MIXED | {"is_causal": True},
    "mixed-both-ways": MIXED | {"is_causal": False},
    "window-by-count": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "yarn-biased": {"rope_parameters": dict(YARN), "attention_bias": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_match_the_published_reference_after_partial_acceptance(layout):
    """Two rows accept different counts; what a row did not accept stays in our buffers as rubbish."""
    reference = pytest.importorskip("dflash.model", reason="the published reference (PyPI dflash) is not installed")
    hf = draft_config(**LAYOUTS[layout])
    model = reference.DFlashDraftModel(hf).eval()
    randomise(model)
    config, params = ours(hf), params_of(model)
    width = len(DFLASH["target_layer_ids"]) * config.hidden_size
    caches = [reference._make_cache(hf) for _ in range(2)]
    filled, committed = empty(config, 2), np.array([0, 0])
    for turn, accepted in enumerate([(7, 11), (4, 1), (1, 3), (2, 4)]):
        features = random(2, 11, width, seed=turn)
        block = random(2, BLOCK, config.hidden_size, seed=100 + turn)
        start = committed + np.array(accepted)
        filled = extend(config, params, features, filled, committed)
        hidden = run(config, params, block, filled, start)
        for row, past in enumerate(caches):
            with torch.no_grad():
                expected = model(
                    target_hidden=torch.tensor(features[row : row + 1, : accepted[row]]),
                    noise_embedding=torch.tensor(block[row : row + 1]),
                    position_ids=torch.arange(committed[row], start[row] + BLOCK)[None],
                    past_key_values=past,
                    use_cache=True,
                )
            reference._crop_to(past, int(start[row]))
            np.testing.assert_allclose(hidden[row], expected[0], atol=2e-5, err_msg=f"turn {turn}, row {row}")
        committed = start


def test_the_tree_of_shapes_is_that_of_the_published_reference():
    reference = pytest.importorskip("dflash.model", reason="the published reference (PyPI dflash) is not installed")
    hf = draft_config(attention_bias=True)
    theirs = params_of(reference.DFlashDraftModel(hf))
    assert jax.tree.map(jnp.shape, parameters.shapes(ours(hf))) == jax.tree.map(jnp.shape, theirs)


@pytest.mark.parametrize(
    "changes", [{"output_multiplier": 0.5}, {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 0.0}]
)
@pytest.mark.parametrize("nested", [False, True])
def test_logits_are_adjusted_as_the_published_reference_does(changes, nested):
    reference = pytest.importorskip("dflash.model", reason="the published reference (PyPI dflash) is not installed")
    hf = draft_config(**({"dflash_config": DFLASH | changes} if nested else changes))
    logits = random(1, BLOCK, 61) * 5
    expected = reference.DFlashDraftModel(hf).compute_logits(torch.tensor(logits), torch.nn.Identity())
    np.testing.assert_allclose(adjust_logits(ours(hf), jnp.asarray(logits)), expected, atol=1e-5)


def test_scale_and_soft_cap_written_down():
    config = dataclasses.replace(small()[0], output_multiplier=2.0, final_logit_softcapping=3.0)
    np.testing.assert_allclose(adjust_logits(config, jnp.array([[[0.0, 1.5, -99.0]]])), [[[0.0, 2.2847825, -3.0]]])


def test_the_embedding_is_scaled_before_the_first_layer():
    config, params = small()
    scaled = dataclasses.replace(config, input_embedding_scale=4.0)
    block, filled = random(1, BLOCK, 24), empty(config, 1)
    np.testing.assert_array_equal(run(scaled, params, block, filled, [5]), run(config, params, block * 4, filled, [5]))


@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_context_added_in_pieces_equals_context_added_at_once(layout):
    config, params = small(**LAYOUTS[layout])
    features = random(2, 12, 48)
    whole = extend(config, params, features, empty(config, 2), [0, 3])
    pieces = empty(config, 2)
    for first, last in [(0, 5), (5, 7), (7, 12)]:
        pieces = extend(config, params, features[:, first:last], pieces, [first, first + 3])
    jax.tree.map(lambda one, many: np.testing.assert_allclose(many, one, atol=1e-6), whole, pieces)


def test_one_fused_context_serves_every_layer_and_skips_its_input_norm():
    """Layers with equal projections hold equal keys and values, though their input norms differ (law 2)."""
    config, params = small()
    params["layers_1"]["attention"] = params["layers_0"]["attention"]
    filled = extend(config, params, random(1, 6, 48), empty(config, 1), [0])
    jax.tree.map(np.testing.assert_array_equal, *filled)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, True),
        ({"is_causal": False}, True),
        ({"is_causal": True}, False),
        ({"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 8}, False),
        ({"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 8, "is_causal": False}, True),
    ],
    ids=["full", "full-both-ways", "full-causal", "sliding", "sliding-both-ways"],
)
def test_whether_slot_1_sees_the_last_slot(changes, seen):
    config, params = small(**changes)
    filled = extend(config, params, random(1, 6, 48), empty(config, 1), [0])

    def slot_1(block: jax.Array) -> jax.Array:
        return (run(config, params, block, filled, [6])[0, 1] * jnp.asarray(random(24, seed=2))).sum()

    slope = jax.jit(jax.grad(slot_1))(jnp.asarray(random(1, BLOCK, 24)))[0, -1]
    assert bool(jnp.any(slope != 0)) == seen


@pytest.mark.parametrize("layout", ["full", "mixed", "mixed-both-ways"])
def test_a_block_sees_features_strictly_before_its_anchor(layout):
    config, params = small(**LAYOUTS[layout])
    features, block = random(1, 12, 48), random(1, BLOCK, 24)

    def hidden(features: np.ndarray) -> jax.Array:
        return run(config, params, block, extend(config, params, features, empty(config, 1), [0]), [8])

    after, before = features.copy(), features.copy()
    after[:, 8:] += 1
    before[:, 7] += 1
    np.testing.assert_array_equal(hidden(after), hidden(features))
    assert (hidden(before) != hidden(features)).any()


def test_a_row_does_not_depend_on_its_neighbour():
    config, params = small(**MIXED)
    features, block = random(2, 12, 48), random(2, BLOCK, 24)
    filled = extend(config, params, features, empty(config, 2), [0, 0])
    both = run(config, params, block, filled, [5, 9])
    alone = run(config, params, block[1:], jax.tree.map(lambda x: x[1:], filled), [9])
    np.testing.assert_allclose(both[1:], alone, atol=1e-6)


def test_a_partial_rotary_factor_holds_for_context_and_block_alike():
    """Shifting all positions leaves a block as it is only where keys and queries turn by the same recipe."""

    def hidden(shift: int, **changes: Any) -> jax.Array:
        # The window hides the empty rows before the shifted context.
        layers = {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 7}
        config, params = small(**layers | changes)
        filled = extend(config, params, random(1, 6, 48), empty(config, 1), [shift])
        return run(config, params, random(1, BLOCK, 24), filled, [shift + 6])

    partial = hidden(0, partial_rotary_factor=0.4)
    np.testing.assert_allclose(hidden(20, partial_rotary_factor=0.4), partial, atol=1e-5)
    assert np.abs(hidden(0) - partial).max() > 1e-2


def test_float64_is_never_narrowed(float64):
    """Differences over a step of 1e-6 are slopes only where nothing is rounded to float32 on the way."""
    config, params = small(**MIXED)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    features, block = random(1, 9, 48).astype(np.float64), random(1, BLOCK, 24).astype(np.float64)

    def height(nudge: Any) -> jax.Array:
        filled = extend(config, params, features + nudge, empty(config, 1, "float64"), [0])
        hidden = run(config, params, block - nudge, filled, [9])
        return (hidden * jnp.sin(jnp.arange(hidden.size).reshape(hidden.shape))).sum()

    value, slope = jax.value_and_grad(height)(0.0)
    assert value.dtype == slope.dtype == np.dtype("float64")
    np.testing.assert_allclose((height(1e-6) - height(-1e-6)) / 2e-6, slope, atol=1e-6)


def test_bfloat16_weights_stay_near_the_exact_result():
    config, params = small(**MIXED)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    features, block = (jnp.asarray(x, jnp.bfloat16) for x in (random(1, 9, 48), random(1, BLOCK, 24)))
    hidden = run(config, narrow, block, extend(config, narrow, features, empty(config, 1, "bfloat16"), [0]), [9])
    assert hidden.dtype == jnp.bfloat16
    wide, features, block = jax.tree.map(lambda x: x.astype(jnp.float32), (narrow, features, block))
    exact = run(config, wide, block, extend(config, wide, features, empty(config, 1), [0]), [9])
    np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.1)


def test_drafts_hold_neither_embedding_nor_head():
    config, params = small()
    assert set(params) == {"fc", "context_norm", "final_norm", "layers_0", "layers_1"}
    assert set(params["fc"]) == {"kernel"}
    assert params["fc"]["kernel"].shape == (2 * config.hidden_size, config.hidden_size)
