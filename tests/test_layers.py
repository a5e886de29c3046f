import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import presets
from dflash_jax.layers import Linear, Mlp, RMSNorm

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_the_norm_divides_by_the_root_mean_square(dtype, tolerance, float64):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 3, 16)).astype(dtype), rng.normal(size=16).astype(dtype)
    ours: Any = RMSNorm(0.1).apply({"params": {"scale": jnp.asarray(scale)}}, jnp.asarray(x))
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours, norm(x, scale, 0.1), atol=tolerance)


def test_the_norm_of_bfloat16_values_is_rounded_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 33)), jnp.bfloat16)
    ours: Any = RMSNorm(1e-6).apply({"params": {"scale": jnp.ones(33, jnp.bfloat16)}}, x)
    exact = norm(np.asarray(x, np.float32), np.ones(33), 1e-6)
    assert ours.dtype == jnp.bfloat16
    assert (ours == jnp.asarray(exact, jnp.bfloat16)).mean() > 0.99


def test_the_scale_multiplies_what_was_already_rounded_to_bfloat16():
    """As in Hugging Face: 1/3 rounds to 0.333984375, and only then is multiplied by 3."""
    x = jnp.asarray([[1 / 3, np.sqrt(2 - 1 / 9)]], jnp.bfloat16)
    ours: Any = RMSNorm(1e-6).apply({"params": {"scale": jnp.asarray([3.0, 1.0], jnp.bfloat16)}}, x)
    assert float(ours[0, 0]) == float(jnp.asarray(0.333984375 * 3, jnp.bfloat16))


def test_the_mlp_gates_with_silu():
    rng = np.random.default_rng(0)
    kernels = {name: rng.normal(size=shape) for name, shape in [("gate", (6, 9)), ("up", (6, 9)), ("down", (9, 6))]}
    params = {f"{name}_proj": {"kernel": jnp.asarray(kernel, jnp.float32)} for name, kernel in kernels.items()}
    config = dataclasses.replace(presets.TARGETS["qwen3-0.6b"], hidden_size=6, intermediate_size=9)
    x = rng.normal(size=(1, 2, 6))
    gate = x @ kernels["gate"]
    expected = (gate / (1 + np.exp(-gate)) * (x @ kernels["up"])) @ kernels["down"]
    ours: Any = Mlp(config).apply({"params": params}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_gradients_of_weights_are_added_up_in_float32(use_bias):
    """Rows of bfloat16 on several devices are added in the dtype of the sum: JAX's own rule would round each part."""
    rng = np.random.default_rng(0)
    x, pull = (jnp.asarray(rng.normal(size=(4, 50, size)), jnp.bfloat16) for size in (8, 6))
    params = {"kernel": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)}
    params |= {"bias": jnp.asarray(rng.normal(size=6), jnp.float32)} if use_bias else {}
    layer: Any = Linear(6, use_bias=use_bias)
    y, back = jax.vjp(lambda params, x: layer.apply({"params": params}, x), params, x)
    gradients, d_x = back(pull)
    assert y.dtype == d_x.dtype == jnp.bfloat16
    wide, wide_pull = np.asarray(x, np.float64).reshape(-1, 8), np.asarray(pull, np.float64).reshape(-1, 6)
    exact = {"kernel": wide.T @ wide_pull} | ({"bias": wide_pull.sum(axis=0)} if use_bias else {})
    for name, gradient in gradients.items():
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-5, atol=1e-4)  # bfloat16 is off by up to 0.1


def test_gradients_of_a_norms_scale_are_added_up_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(200, 5)), jnp.bfloat16)
    scale = jnp.ones(5, jnp.float32)
    gradient = jax.grad(lambda scale: RMSNorm(1e-6).apply({"params": {"scale": scale}}, x).sum())(scale)  # type: ignore[union-attr]
    normed: Any = RMSNorm(1e-6).apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(gradient, np.asarray(normed, np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
