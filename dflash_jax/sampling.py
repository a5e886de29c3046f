"""Choosing tokens from the target's logits: greedy, or by temperature, top-k and top-p (law 7)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class Policy(NamedTuple):
    """How each row chooses. Temperature 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: Float[Array, "b"]
    top_k: Int[Array, "b"]
    top_p: Float[Array, "b"]
    seed: UInt32[Array, "b"]
    request: UInt32[Array, "b"]


def choose(logits: Float[Array, "b t v"], positions: Int[Array, "b t"], policy: Policy) -> Int[Array, "b t"]:
    """Choose the token of each position from the logits that judge it.

    A choice depends on the logits, the policy and (seed, request, position) alone, so a row says the same whatever
    decodes beside it, and whatever block a position is judged in (law 10).
    """
    greedy = likeliest(logits)
    sampling = policy.temperature > 0

    def sampled() -> Int[Array, "b t"]:
        return jnp.where(sampling[:, None], _sample(logits, positions, policy), greedy)

    return jax.lax.cond(jnp.any(sampling), sampled, lambda: greedy)


def likeliest(logits: Float[Array, "b t v"]) -> Int[Array, "b t"]:
    """Return the first token with the highest logit.

    Two plain reductions: `argmax` reduces pairs, which XLA's CPU backend does thirty times slower.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.min(jnp.where(logits == highest, tokens, logits.shape[-1] - 1), axis=-1)


def filtered(logits: Float[Array, "b t v"], policy: Policy) -> tuple[Float[Array, "b t v"], Int[Array, "b t v"]]:
    """Return log-probabilities in falling order, -inf where filtered out, and the tokens they belong to.

    Temperature comes first, then top-k, then top-p over what is left, which keeps the token that crosses it.
    """
    temperature = jnp.where(policy.temperature > 0, policy.temperature, 1.0)[:, None, None]
    tokens = jnp.argsort(-logits, axis=-1).astype(jnp.int32)
    scores = jnp.take_along_axis(logits, tokens, axis=-1) / temperature.astype(logits.dtype)
    ranks = jnp.arange(logits.shape[-1])[None, None]
    top_k = policy.top_k[:, None, None]
    scores = jnp.where((top_k == 0) | (ranks < top_k), scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A top_p of 1 keeps all, also where rounding lets the sum reach 1 early.
    top_p = jnp.where(policy.top_p < 1, policy.top_p, jnp.inf)[:, None, None]
    return jax.nn.log_softmax(jnp.where(before < top_p, scores, -jnp.inf), axis=-1), tokens


def _sample(logits: Float[Array, "b t v"], positions: Int[Array, "b t"], policy: Policy) -> Int[Array, "b t"]:
    scores, tokens = filtered(logits, policy)

    def row_key(seed: Array, request: Array) -> Array:
        return jax.random.fold_in(jax.random.key(seed), request)

    keys = jax.vmap(row_key)(policy.seed, policy.request)
    keys = jax.vmap(lambda key, spots: jax.vmap(lambda spot: jax.random.fold_in(key, spot))(spots))(keys, positions)
    ranks = jax.vmap(jax.vmap(jax.random.categorical))(keys, scores)
    return jnp.take_along_axis(tokens, ranks[..., None], axis=-1)[..., 0]
