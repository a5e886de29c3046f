import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_jax.errors import UserError
from dflash_jax.rope import Rotary, angles, rotate

pytestmark = pytest.mark.usefixtures("strict_dtypes")

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("position", [4095, 40000])
def test_angles_are_exact_far_out(theta, position):
    exact = position * theta ** -(np.arange(0, 128, 2) / 128)
    cos, sin = angles(Rotary(theta=theta), 128, jnp.array([[position]]))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0], np.cos(exact), atol=1e-4)
    np.testing.assert_allclose(sin[0, 0], np.sin(exact), atol=1e-4)


def test_bfloat16_heads_turn_by_exact_angles():
    """A head of ones at position p becomes cos - sin and cos + sin; only the result is rounded to bfloat16."""
    exact = 4095 * 1e6 ** -(np.arange(0, 128, 2) / 128)
    turned = rotate(jnp.ones((1, 1, 1, 128), jnp.bfloat16), angles(Rotary(theta=1e6), 128, jnp.array([[4095]])))
    assert turned.dtype == jnp.bfloat16
    expected = np.concatenate([np.cos(exact) - np.sin(exact), np.cos(exact) + np.sin(exact)])
    np.testing.assert_allclose(turned[0, 0, 0].astype(np.float32), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3"} | LLAMA3,
        {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
        {"rope_type": "yarn"} | YARN,
        {"rope_type": "yarn"} | YARN | {"truncate": False},
        {"rope_type": "yarn"} | YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
        {"rope_type": "yarn"} | YARN | {"attention_factor": 1.3},
        {"rope_type": "yarn"} | YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn"} | YARN | {"mscale": 2.0},
        {"rope_type": "yarn"} | YARN | {"factor": 0.5},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_angles_match_transformers(parameters):
    parameters = parameters | {"rope_theta": 1e4}
    config = Qwen3Config(head_dim=32, max_position_embeddings=512, rope_parameters=dict(parameters))
    positions = np.arange(600)[None]
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.tensor(positions))
    rotary = Rotary.from_hf({"rope_parameters": parameters, "max_position_embeddings": 512}, "full_attention")
    for ours, both_halves in zip(angles(rotary, 32, jnp.asarray(positions, jnp.int32)), theirs, strict=True):
        np.testing.assert_allclose(ours, both_halves[..., :16].numpy(), atol=1e-4)


def test_llama_3_1_frequencies_match_transformers():
    scaling = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3 | {"original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=dict(scaling))
    rotary = Rotary.from_hf({"rope_parameters": scaling}, "full_attention")
    np.testing.assert_allclose(rotary.frequencies(128), LlamaRotaryEmbedding(config).inv_freq.numpy(), rtol=1e-6)


def test_yarn_gain_written_down():
    section = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}

    def gain(**more: float) -> float:
        return Rotary.from_hf({"rope_parameters": section | more}, "full_attention").attention_factor

    assert gain() == pytest.approx(1.1386294361119891)  # 0.1 ln 4 + 1
    assert gain(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert gain(attention_factor=0.7, mscale=1.0, mscale_all_dim=2.0) == 0.7


def test_only_the_leading_share_of_a_head_turns():
    """Fault: a quarter of the head was to turn, and all of it did."""
    rotary = Rotary.from_hf({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "full_attention")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 16)), jnp.float32)
    turned = rotate(x, angles(rotary, 16, jnp.arange(5, 8)[None]))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    phases = np.arange(5, 8)[:, None] * np.array([1.0, 0.01])  # 10000 ** -(0, 1/2)
    plane = (np.asarray(x[..., :2]) + 1j * np.asarray(x[..., 2:4])) * np.exp(1j * phases)
    np.testing.assert_allclose(turned[..., :4], np.concatenate([plane.real, plane.imag], -1), atol=1e-6)


def test_settings_of_a_layer_type_are_read_from_its_own_section():
    sections = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert Rotary.from_hf({"rope_parameters": sections}, "full_attention") == Rotary(1e6, "linear", factor=8.0)
    assert Rotary.from_hf({"rope_parameters": sections}, "sliding_attention") == Rotary(1e4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 5e-324}, "rope_theta": 1e4}, "factor"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_fast": 1e308}, "rope_theta": 1e4}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_slow": 5e-324}, "rope_theta": 1e4}, "beta_slow"),
        (
            {"rope_scaling": {"type": "yarn"} | YARN | {"original_max_position_embeddings": 0.5}, "rope_theta": 1e4},
            "original_max_position_embeddings",
        ),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope_theta"),
        ({"rope_parameters": "yarn", "rope_theta": 1e4}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": None}, "rope_theta": 1e4}, "rope_parameters"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}, "rope_theta": 1e4}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}, "rope_theta": 1e4}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_theta": 1e4}, "original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}, "rope_theta": 1e4},
            "low_freq_factor",
        ),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3 | {"high_freq_factor": None}, "rope_theta": 1e4}, "high_freq"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1e4}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_fast": "32"}, "rope_theta": 1e4}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_slow": -1}, "rope_theta": 1e4}, "beta_slow"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"attention_factor": "1"}, "rope_theta": 1e4}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"mscale": "1", "mscale_all_dim": 1}, "rope_theta": 1e4}, "mscale"),
        ({"partial_rotary_factor": 0, "rope_theta": 1e4}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5, "rope_theta": 1e4}, "partial_rotary_factor"),
    ],
)
def test_absent_or_absurd_settings_are_refused_by_name(config, message):
    with pytest.raises(UserError, match=message) as error:
        Rotary.from_hf(config, "full_attention")
    assert "\n" not in str(error.value)


def test_yarn_without_a_slowest_dimension_is_refused():
    rotary = Rotary.from_hf({"rope_scaling": {"type": "yarn"} | YARN, "rope_theta": 1}, "full_attention")
    with pytest.raises(UserError, match=r"needs a `rope_theta` over 1; found 1\.0"):
        rotary.frequencies(8)
