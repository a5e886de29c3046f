import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import presets
from dflash_jax.layers import Mlp, RMSNorm

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
