"""Verification: how much of a block the target keeps, and where the answer ends."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def accepted(chosen: Int[Array, "b t"], drafts: Int[Array, "b t-1"]) -> Int[Array, "b"]:
    """Count the leading drafts that are the target's own choice (law 6).

    `chosen[:, k]` is the target's choice for the slot after k, given that all before it is right. Under sampling, too,
    this is lossless for a draft that proposes one token a slot: the choice is a sample y of the target's p, and equals
    the draft x with probability p(x); where it does not, y is distributed as p without x (law 7).
    """
    same = chosen[:, :-1] == drafts
    return jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


class Emission(NamedTuple):
    """What a block adds to the answer: the first `length` of t tokens, and why the answer ends there, if it does."""

    length: Int[Array, "b"]
    stopped: Bool[Array, "b"]
    full: Bool[Array, "b"]


def emission(
    tokens: Int[Array, "b t"], count: Int[Array, "b"], stops: Int[Array, "b e"], room: Int[Array, "b"]
) -> Emission:
    """Cut the first `count` tokens after the first stop token, and at `room`, where a stop wins over the cap (law 8).

    `stops` is padded with -1, which is no token.
    """
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    kept = jnp.minimum(count, room)[:, None]
    is_stop = (tokens[:, :, None] == stops[:, None, :]).any(axis=-1) & (slots[None] < kept)
    stopped = is_stop.any(axis=1)
    until_stop = jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1
    count = jnp.where(stopped, until_stop, kept[:, 0])
    return Emission(count, stopped, (count == room) & ~stopped)
