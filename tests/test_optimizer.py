import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training import optimizer
from training.config import OptimizerConfig

PARAMS = {"kernel": jnp.full((4, 6), 2.0), "scale": jnp.full(6, 2.0)}
GRADIENTS = {"kernel": jnp.full((4, 6), 0.1), "scale": jnp.full(6, -0.1)}
STEPS = 100


def updates(config, *gradients):
    """The last of the updates that some gradients bring."""
    made = optimizer.build(config, STEPS)
    state = made.init(PARAMS)
    for gradient in gradients:
        found, state = made.update(gradient, state, PARAMS)
    return found, state


def scaled(factor):
    return jax.tree.map(lambda leaf: leaf * factor, GRADIENTS)


def test_gradients_are_clipped_before_anything_looks_at_them():
    norm = float(optax.tree.norm(GRADIENTS))
    config = OptimizerConfig(clip=norm)
    # Adam does not mind one scale for all steps, but two.
    over, _ = updates(config, GRADIENTS, scaled(50))
    right, _ = updates(config, GRADIENTS, GRADIENTS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), over, right)


def test_the_rate_follows_the_schedule():
    config = OptimizerConfig(learning_rate=1e-2, warmup=0.04, clip=100.0)
    sizes = []
    made = optimizer.build(config, STEPS)
    state = made.init(PARAMS)
    for _ in range(STEPS):
        found, state = made.update(GRADIENTS, state, PARAMS)
        sizes.append(float(abs(found["kernel"]).max()))
    # Under constant gradients Adam's step is the rate itself: a quarter at first, the peak after four, then a cosine.
    cosine = 0.5 * (1 + np.cos(np.pi * (np.arange(4, STEPS) - 4) / (STEPS - 4)))
    np.testing.assert_allclose(sizes[:4], [2.5e-3, 4.375e-3, 6.25e-3, 8.125e-3], rtol=1e-3)
    np.testing.assert_allclose(sizes[4:], 1e-2 * cosine, rtol=1e-3, atol=1e-7)
    assert int(optimizer.updates_of(state)) == STEPS


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_matrices_decay(name):
    config = OptimizerConfig(name=name, learning_rate=1e-2, warmup=0.0, weight_decay=0.1)
    nothing = jax.tree.map(jnp.zeros_like, GRADIENTS)
    found, _ = updates(config, nothing)
    np.testing.assert_allclose(found["kernel"], -1e-2 * 0.1 * PARAMS["kernel"], rtol=1e-5)
    assert not found["scale"].any()


def test_muons_matrices_move_as_far_as_adamws():
    gradients = {"kernel": jax.random.normal(jax.random.key(0), (4, 6)), "scale": jnp.ones(6)}
    found, state = updates(OptimizerConfig(name="muon", learning_rate=1e-2, warmup=0.0), gradients)
    size = float(jnp.sqrt(jnp.mean(jnp.square(found["kernel"]))))
    # 0.2 of the rate for a matrix whose singular values are all one; the iteration brings them near it.
    assert 0.12e-2 < size < 0.25e-2
    assert int(optimizer.updates_of(state)) == 1
