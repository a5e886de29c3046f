"""How much of a block goes into drafting and verifying: each as a program of its own, in turns with whole blocks.

These are estimates. The loop runs both in one program, where the compiler may overlap or join what is apart here.
"""

import dataclasses
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax import masks
from dflash_jax.cache import Cache
from dflash_jax.sampling import Policy, choose
from inference import decode
from inference.decode import DecodeState, Models, Weights
from inference.engine import Engine

PASSES, ROUNDS = 4, 9


class Parts(NamedTuple):
    """Shares of a block's time; the rest is neither."""

    draft: float
    verify: float


def part_shares(engine: Engine) -> Parts:
    """Time drafting, verifying and whole blocks by turns, all rows at work after the text that decoding left.

    Verifying is the target's pass, its logits and the choice, and the features' way into the draft's context. A whole
    block is the loop's own, with the host's look at the end. Each share is the median over rounds, since others use the
    machine, too. The state is used up; the engine makes another.
    """
    models, weights = dataclasses.replace(engine._speculative, sizes=()), engine._weights
    state, engine._state = engine._state or engine._empty_state(), None
    seconds = []
    for _ in range(ROUNDS + 1):  # the first compiles
        state = _endless(models, state)
        start = state.lengths.block_until_ready()
        began = time.perf_counter()
        block = _draft(models, weights, state.tokens[:, :1], state.draft, start).block_until_ready()
        drafted = time.perf_counter()
        chosen, (target, draft) = _verify(models, weights, block, (state.target, state.draft), start, state.policy)
        chosen.block_until_ready()
        verified = time.perf_counter()
        state = engine._decode(models, state._replace(target=target, draft=draft), PASSES, None)
        jax.device_get(decode.look(models, state))
        seconds.append((drafted - began, verified - drafted, time.perf_counter() - verified))
    drafting, verifying, whole = np.array(seconds[1:]).T
    shares = np.median([drafting / whole, verifying / whole], axis=1)
    return Parts(*(shares / max(1.0, shares.sum())).tolist())


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def _endless(models: Models, state: DecodeState) -> DecodeState:
    """Set every row to work, where there is room for what is measured, on an answer that nothing ends."""
    rows = state.tokens.shape[1]
    room = max(0, rows - (PASSES + 1) * models.block_size)
    running = state._replace(
        lengths=jnp.minimum(state.lengths, room),
        last=jnp.full_like(state.last, 2 * rows),
        stops=jnp.full_like(state.stops, -1),
        blocks=jnp.zeros_like(state.blocks),
        finish=jnp.full_like(state.finish, decode.RUNNING),
    )
    return decode.spread(models, running)


@functools.partial(jax.jit, static_argnames="models")
def _draft(
    models: Models, weights: Weights, anchors: Int[Array, "b 1"], cache: Cache, start: Int[Array, "b"]
) -> Int[Array, "b {models.block_size}"]:
    """Draft a block several times, each time after a token of the one before, so that none can be left out."""

    def once(_: int, block: Int[Array, "b {models.block_size}"]) -> Int[Array, "b {models.block_size}"]:
        last = block[:, -1:]
        return jnp.concatenate([last, decode.propose(models, weights, last, cache, start)], axis=1)

    return jax.lax.fori_loop(0, PASSES, once, jnp.tile(anchors, (1, models.block_size)))


@functools.partial(jax.jit, static_argnames="models", donate_argnames="caches")
def _verify(
    models: Models,
    weights: Weights,
    block: Int[Array, "b t"],
    caches: tuple[Cache, Cache],
    start: Int[Array, "b"],
    policy: Policy,
) -> tuple[Int[Array, "b t"], tuple[Cache, Cache]]:
    """Verify several times, each time what was chosen in the one before."""
    judged = masks.positions(start, models.block_size) + 1

    def once(_: int, carry: tuple[Array, tuple[Cache, Cache]]) -> tuple[Array, tuple[Cache, Cache]]:
        block, (target, draft) = carry
        hidden, features, target = decode.run_target(models, weights, block, target, start)
        draft = decode.extend_context(models, weights, features, draft, start)
        return choose(decode.target_logits(models, weights, hidden), judged, policy), (target, draft)

    return jax.lax.fori_loop(0, PASSES, once, (block, caches))
