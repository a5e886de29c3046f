"""How long drafting and verifying take alone: each as a program of its own, outside the decoding loop.

These are estimates. The loop runs both in one program, where the compiler may overlap or join what is apart here.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax import masks
from dflash_jax.cache import Cache
from dflash_jax.sampling import Policy, choose
from inference import decode
from inference.decode import Models, Weights
from inference.engine import Engine

PASSES, ROUNDS = 4, 5


class Parts(NamedTuple):
    """Seconds that the parts of a block take for all rows of a batch together."""

    draft: float
    verify: float


def part_seconds(engine: Engine) -> Parts:
    """Time drafting, and verifying (the target's pass, its logits and the choice), at the state that decoding left.

    The best of a few rounds counts, since others use the machine too. The state is used up; the engine makes another.
    """
    models, weights = engine._speculative, engine._weights
    state, engine._state = engine._state or engine._empty_state(), None
    anchors, start, cache = state.tokens[:, :1], state.lengths, state.target
    drafts, checks = [], []
    for _ in range(ROUNDS + 1):  # the first compiles
        began = time.perf_counter()
        block = _draft(models, weights, anchors, state.draft, start).block_until_ready()
        drafted = time.perf_counter()
        chosen, cache = _verify(models, weights, block, cache, start, state.policy)
        chosen.block_until_ready()
        drafts.append(drafted - began)
        checks.append(time.perf_counter() - drafted)
    return Parts(min(drafts[1:]) / PASSES, min(checks[1:]) / PASSES)


@functools.partial(jax.jit, static_argnames="models")
def _draft(
    models: Models, weights: Weights, anchors: Int[Array, "b 1"], cache: Cache, start: Int[Array, "b"]
) -> Int[Array, "b {models.block_size}"]:
    """Draft a block several times, each time after a token of the one before, so that none can be left out."""

    def once(_: int, block: Int[Array, "b {models.block_size}"]) -> Int[Array, "b {models.block_size}"]:
        last = block[:, -1:]
        return jnp.concatenate([last, decode.propose(models, weights, last, cache, start)], axis=1)

    return jax.lax.fori_loop(0, PASSES, once, jnp.tile(anchors, (1, models.block_size)))


@functools.partial(jax.jit, static_argnames="models", donate_argnames="cache")
def _verify(
    models: Models,
    weights: Weights,
    block: Int[Array, "b t"],
    cache: Cache,
    start: Int[Array, "b"],
    policy: Policy,
) -> tuple[Int[Array, "b t"], Cache]:
    """Verify several times, each time what was chosen in the one before."""
    judged = masks.positions(start, models.block_size) + 1

    def once(_: int, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        hidden, _features, after = decode._target(models, weights, carry[0], carry[1], start)
        return choose(decode._logits(models, weights, hidden), judged, policy), after

    return jax.lax.fori_loop(0, PASSES, once, (block, cache))
