"""Choosing tokens from the target's logits: greedy, or by temperature, top-k and top-p (law 7)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Smaller ones would be rounded to nothing.
LEAST_SHARE = 1e-30


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


def filtered(logits: Float[Array, "b t v"], policy: Policy) -> Float[Array, "b t v"]:
    """Return log-probabilities, -inf where filtered out.

    Temperature comes first, then top-k, then top-p over what is left, which keeps the token that crosses it. Tokens
    as likely as the last one that is kept are kept, too.
    """
    temperature = jnp.where(policy.temperature > 0, policy.temperature, 1.0)[:, None, None]
    scores = logits / temperature.astype(logits.dtype)
    scores = jnp.where(scores == 0, 0, scores)  # zeros of both signs are as likely
    top_k = jnp.where(policy.top_k > 0, policy.top_k, jnp.inf)
    scores = _heaviest(scores, jnp.ones_like(scores), top_k)
    # A top_p of 1 keeps all, also where rounding lets the sum reach 1 early; the likeliest always weighs enough.
    top_p = jnp.where(policy.top_p < 1, jnp.maximum(policy.top_p, LEAST_SHARE), jnp.inf)
    return jax.nn.log_softmax(_heaviest(scores, jax.nn.softmax(scores, axis=-1), top_p), axis=-1)


def _heaviest(
    scores: Float[Array, "b t v"], weights: Float[Array, "b t v"], enough: Float[Array, "b"]
) -> Float[Array, "b t v"]:
    """Keep the highest scores that together weigh `enough`, and all where even all of them do not; others are -inf.

    The lowest score that stays is found bit by bit: a sort would take far longer, and many times the memory.
    """
    bits = jnp.finfo(scores.dtype).bits
    whole = jnp.dtype(f"uint{bits}")
    sign = jnp.asarray(1, whole) << (bits - 1)
    raw = jax.lax.bitcast_convert_type(scores, whole)
    ordered = jnp.where(raw >= sign, ~raw, raw | sign)  # as integers these compare as the scores do

    def narrow(i: Array, lowest: Array) -> Array:
        higher = lowest | (sign >> i.astype(whole))
        weight = jnp.where(ordered >= higher, weights, 0).sum(axis=-1, keepdims=True)
        return jnp.where(weight >= enough[:, None, None], higher, lowest)

    def search() -> Float[Array, "b t v"]:
        lowest = jax.lax.fori_loop(0, bits, narrow, jnp.zeros_like(ordered[..., :1]))
        return jnp.where(ordered >= lowest, scores, -jnp.inf)

    return jax.lax.cond(jnp.any(enough < jnp.inf), search, lambda: scores)


def _sample(logits: Float[Array, "b t v"], positions: Int[Array, "b t"], policy: Policy) -> Int[Array, "b t"]:
    """Take a token by its probability: the likeliest after Gumbel's noise is added to the logarithms."""

    def row_key(seed: Array, request: Array) -> Array:
        return jax.random.fold_in(jax.random.key(seed), request)

    keys = jax.vmap(row_key)(policy.seed, policy.request)
    keys = jax.vmap(lambda key, spots: jax.vmap(lambda spot: jax.random.fold_in(key, spot))(spots))(keys, positions)
    # In its default mode the noise has 2^23 values, and tokens rarer than that would never come.
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype, mode="high")))(keys)
    return likeliest(filtered(logits, policy) + noise)
