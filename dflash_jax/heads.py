"""A frozen head: scores of the vocabulary, or of a part of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_jax.layers import EXACT


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def score(hidden: Float[Array, "b t d"], weight: Float[Array, "..."], axes: str) -> Float[Array, "b t v"]:
    """Multiply by a frozen head, or by some of its rows, which gets no gradient (law 4).

    Args:
        hidden: states after the final norm.
        weight: the head.
        axes: how it lies, "vd" or "dv".

    Returns:
        Logits, in float32 or wider.
    """
    wide = np.promote_types(hidden.dtype, np.float32)
    return jnp.einsum(f"btd,{axes}->btv", hidden, weight, precision=EXACT, preferred_element_type=wide)


def _score_forward(hidden: Array, weight: Array, axes: str) -> tuple[Array, tuple[Array, Array]]:
    return score(hidden, weight, axes), (weight, jnp.zeros((), hidden.dtype))


def _score_backward(axes: str, kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    # In the weight's dtype: JAX's own rule would make a float32 copy of a bfloat16 head, and multiply in float32.
    weight, like = kept
    narrow = cotangent.astype(weight.dtype)
    product = jnp.einsum(f"btv,{axes}->btd", narrow, weight, precision=EXACT, preferred_element_type=cotangent.dtype)
    return product.astype(like.dtype), None


score.defvjp(_score_forward, _score_backward)
