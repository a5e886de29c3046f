"""How long the next block should be: what was accepted so far, and what each size costs, say so.

A draft trained for blocks of B tokens serves shorter ones, too, and a block of one token is plain decoding. The size is
chosen on the device before every block, for all rows of a batch together: the one that brings most tokens a second, as
far as can be foreseen. It changes no token, only when it comes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# What a slot showed weighs half as much when it was judged 69 times more; while it is not judged, that fades slowly,
# until it is tried again.
KEPT, KEPT_IDLE = 0.99, 0.9995
# The chance that a slot is accepted, as long as nothing is known, as if it had been tried so many times: hopeful, since
# a size that is not tried teaches nothing. docs/experiments.md says what other numbers bring.
FIRST_CHANCE, FIRST_TRIES = 0.6, 20.0


class Acceptance(NamedTuple):
    """How often each row's slots 1, 2, … were judged, and how often they were accepted; what is old weighs less.

    A slot is judged when all before it were accepted. A block that is accepted whole says of later slots nothing.
    """

    tried: Float[Array, "b u"]
    accepted: Float[Array, "b u"]


def candidates(largest: int) -> tuple[int, ...]:
    """Return the sizes to choose from, where the draft proposes blocks of `largest` tokens."""
    return tuple(sorted({1, largest // 4, largest // 2, largest} - {0}))


def observe(seen: Acceptance, size: int, count: Int[Array, "b"], running: Bool[Array, "b"]) -> Acceptance:
    """Add what a block of `size` tokens told, of which `count` drafts were accepted, in rows that run."""
    slots = jnp.arange(1, seen.tried.shape[1] + 1)[None]
    judged = slots <= jnp.minimum(count + 1, size - 1)[:, None]
    right = slots <= count[:, None]
    kept = jnp.where(judged, KEPT, KEPT_IDLE)
    return Acceptance(
        *(jnp.where(running[:, None], old * kept + new, old) for old, new in zip(seen, (judged, right), strict=True))
    )


def expected(seen: Acceptance, sizes: Sequence[int]) -> Float[Array, "b c"]:
    """Return how many tokens a block of each size should bring, the target's own included.

    A slot of which little is known has the chance of the one before it.
    """
    chance = jnp.full_like(seen.tried[:, 0], FIRST_CHANCE)
    reached = jnp.ones_like(chance)
    brought = [reached]
    for tried, accepted in zip(seen.tried.T, seen.accepted.T, strict=True):
        chance = (accepted + FIRST_TRIES * chance) / (tried + FIRST_TRIES)
        reached = reached * chance
        brought.append(brought[-1] + reached)
    return jnp.stack([brought[size - 1] for size in sizes], axis=1)


def fastest(
    seen: Acceptance, running: Bool[Array, "b"], sizes: Sequence[int], costs: Float[Array, "c"]
) -> Int[Array, ""]:
    """Return which of the sizes should bring the running rows most tokens a second.

    Args:
        seen: what was accepted so far.
        running: rows that wait for tokens.
        sizes: to choose from.
        costs: seconds of a block of each size; infinity rules one out.
    """
    tokens = jnp.where(running[:, None], expected(seen, sizes), 0).sum(axis=0)
    return jnp.argmax(tokens / costs)
