"""Decoding on the device: the state of all rows, and the three programs that change it.

`prefill` reads one chunk of a prompt into one row, `admit` starts the row's answer, and `decode` drafts, verifies,
accepts and commits blocks for all rows until there is something for the host to do. Shapes are fixed, and whatever a
request may choose is traced, so nothing compiles twice (law 14).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import masks, sharding
from dflash_jax.acceptance import accepted, emission
from dflash_jax.cache import Cache, empty
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft import Draft, adjust_logits
from dflash_jax.parameters import Params
from dflash_jax.sampling import Policy, choose, likeliest
from dflash_jax.target import Target
from inference.block_sizes import Acceptance, fastest, observe

RUNNING, STOPPED, FULL = 0, 1, 2
MAX_STOPS = 32


@dataclasses.dataclass(frozen=True)
class Models:
    """What the programs are compiled for. A block of one token is plain decoding, and needs no draft.

    With `sizes`, of which `block_size` is the largest, each block has the one that should bring most.
    """

    target: TargetConfig
    draft: DraftConfig | None
    block_size: int
    mesh: Mesh | AbstractMesh
    sizes: tuple[int, ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose outputs the draft reads."""
        return self.draft.target_layer_ids if self.draft else ()


class Weights(NamedTuple):
    """Parameters of both models; the draft's are empty where there is none."""

    target: Params
    draft: Params


class DecodeState(NamedTuple):
    """All that decoding knows of its rows.

    `lengths` is the one truth (law 9): positions before it are committed in every buffer. The token at `lengths` is the
    anchor, emitted but not yet in the caches. A row ends with its last token at `last`.
    """

    target: Cache
    draft: Cache
    tokens: Int[Array, "b s"]
    drafted: Bool[Array, "b s"]  # the token was an accepted draft
    lengths: Int[Array, "b"]
    last: Int[Array, "b"]
    stops: Int[Array, "b e"]
    policy: Policy
    emitted: Int[Array, "b s"]  # tokens of each block
    sizes: Int[Array, "b s"]  # of each block
    seen: Acceptance
    blocks: Int[Array, "b"]
    finish: Int[Array, "b"]


class Request(NamedTuple):
    """What was asked of one row: where its answer must end, its stop tokens, how it chooses (a policy of one row)."""

    prompt_length: Int[Array, ""]
    last: Int[Array, ""]
    stops: Int[Array, "e"]
    policy: Policy


@functools.partial(jax.jit, static_argnames=("models", "batch", "rows", "dtype"))
def empty_state(models: Models, batch: int, rows: int, dtype: jnp.dtype) -> DecodeState:
    """Return a state of idle rows, with buffers of `rows` positions."""

    def fill(value: int | float, dtype: Any, *shape: int) -> Array:
        return jnp.full((batch, *shape), value, dtype)

    state = DecodeState(
        target=empty(models.target, batch, rows, dtype),
        draft=empty(models.draft, batch, rows, dtype) if models.draft else (),
        tokens=fill(0, jnp.int32, rows),
        drafted=fill(0, bool, rows),
        lengths=fill(0, jnp.int32),
        last=fill(0, jnp.int32),
        stops=fill(-1, jnp.int32, MAX_STOPS),
        policy=Policy(
            temperature=fill(0, jnp.float32),
            top_k=fill(0, jnp.int32),
            top_p=fill(1, jnp.float32),
            seed=fill(0, jnp.uint32),
            request=fill(0, jnp.uint32),
        ),
        emitted=fill(0, jnp.int32, rows),
        sizes=fill(0, jnp.int32, rows),
        seen=Acceptance(*(fill(0, jnp.float32, models.block_size - 1) for _ in Acceptance._fields)),
        blocks=fill(0, jnp.int32),
        finish=fill(FULL, jnp.int32),
    )
    return spread(models, state)


def spread(models: Models, state: DecodeState) -> DecodeState:
    """Keep the state where it lies: rows over the data axis, heads over the tensor axis."""
    caches, others = (state.target, state.draft), state._replace(target=(), draft=())
    target, draft = sharding.constrain(models.mesh, sharding.CACHE, caches)
    return sharding.constrain(models.mesh, sharding.ROWS, others)._replace(target=target, draft=draft)


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def prefill(
    models: Models,
    weights: Weights,
    state: DecodeState,
    row: Int[Array, ""],
    tokens: Int[Array, "1 t"],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> tuple[DecodeState, Float[Array, "1 1 d"]]:
    """Read one chunk of a prompt into the caches of one row, from position `start` on.

    Rows of the chunk past the prompt's end are garbage that later writes replace. Features go straight into the draft's
    context and are never stored.

    Returns:
        The state, and the hidden state of position `end`, the prompt's last, if it lies in this chunk.
    """
    at = start[None]
    one = jax.tree.map(functools.partial(_row_of, models.mesh, row), (state.target, state.draft))
    hidden, features, target = run_target(models, weights, tokens, one[0], at)
    draft = extend_context(models, weights, features, one[1], at)
    both = jax.tree.map(
        lambda buffer, part: jax.lax.dynamic_update_slice_in_dim(buffer, part, row, 0),
        (state.target, state.draft),
        (target, draft),
    )
    final = jax.lax.dynamic_slice_in_dim(hidden, end - start, 1, axis=1)
    return spread(models, state._replace(target=both[0], draft=both[1])), final


def _row_of(mesh: Mesh | AbstractMesh, row: Int[Array, ""], buffer: Float[Array, "b k s h"]) -> Float[Array, "1 k s h"]:
    if mesh.shape["data"] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, row, 1)
    # A slice would gather the whole buffer from all devices; a sum sends the one row.
    wanted = jnp.arange(buffer.shape[0]) == row
    return jnp.where(wanted[:, None, None, None], buffer, 0).sum(axis=0, keepdims=True)


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def admit(
    models: Models,
    weights: Weights,
    state: DecodeState,
    row: Int[Array, ""],
    hidden: Float[Array, "1 1 d"],
    request: Request,
) -> DecodeState:
    """Start the answer of a row whose prompt is in the caches: its first token is the target's, from the prefill."""
    first_position = request.prompt_length[None]
    token = choose(target_logits(models, weights, hidden), first_position[:, None], request.policy)
    room = request.last - request.prompt_length + 1
    first = emission(token, jnp.ones_like(first_position), request.stops[None], room[None])

    def put(buffer: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0)

    begun = state._replace(
        tokens=state.tokens.at[row, request.prompt_length].set(token[0, 0]),
        drafted=state.drafted.at[row, request.prompt_length].set(False),
        lengths=put(state.lengths, request.prompt_length),
        last=put(state.last, request.last),
        stops=put(state.stops, request.stops),
        policy=jax.tree.map(lambda buffer, value: put(buffer, value[0]), state.policy, request.policy),
        blocks=put(state.blocks, jnp.zeros((), jnp.int32)),
        finish=put(state.finish, _finish(first.stopped, first.full)[0]),
    )
    return spread(models, begun)


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def decode(
    models: Models,
    weights: Weights,
    state: DecodeState,
    blocks: Int[Array, ""],
    costs: Float[Array, "c"] | None = None,
) -> DecodeState:
    """Decode up to `blocks` blocks, or until a running row ends. `costs` are the seconds of a block of each size."""
    running = (state.finish == RUNNING).sum()

    def busy(carry: tuple[Array, DecodeState]) -> Bool[Array, ""]:
        done, now = carry
        return (done < blocks) & ((now.finish == RUNNING).sum() == running) & (running > 0)

    def step(now_models: Models, carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, now = carry
        return done + 1, spread(models, decode_block(now_models, weights, now))

    def turn(costs: Array, carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        # Loops, each as long as its size is the right one, and not a switch, which would copy the caches.
        for place, size in enumerate(models.sizes):
            of_size = dataclasses.replace(models, block_size=size, sizes=())

            def chosen(carry: tuple[Array, DecodeState], place: int = place) -> Bool[Array, ""]:
                now = carry[1]
                return busy(carry) & (fastest(now.seen, now.finish == RUNNING, models.sizes, costs) == place)

            several = functools.partial(_plain_tokens, of_size, weights, models.block_size, chosen)
            carry = jax.lax.while_loop(chosen, several if size == 1 else functools.partial(step, of_size), carry)
        return carry

    body = functools.partial(step, models) if costs is None else functools.partial(turn, costs)
    return jax.lax.while_loop(busy, body, (jnp.zeros((), jnp.int32), state))[1]


def _plain_tokens(
    models: Models,
    weights: Weights,
    most: int,
    go_on: Callable[[tuple[Array, DecodeState]], Bool[Array, ""]],
    carry: tuple[Array, DecodeState],
) -> tuple[Array, DecodeState]:
    """Decode up to `most` tokens without drafting; their features go into the draft's context together."""
    begun = carry[1]
    shape = (begun.lengths.shape[0], most, models.target.hidden_size * len(models.taps))
    waiting = sharding.constrain(models.mesh, sharding.ROWS, jnp.zeros(shape, begun.draft[0].keys.dtype))

    def step(inner: tuple[Array, DecodeState, Array]) -> tuple[Array, DecodeState, Array]:
        done, now, waiting = inner
        start = anchor_tokens(now)
        judged, features = _judge(models, weights, now, start, start[:, :0])
        waiting = jax.lax.dynamic_update_slice_in_dim(waiting, features, done - carry[0], axis=1)
        return done + 1, spread(models, judged), waiting

    done, state, waiting = jax.lax.while_loop(
        lambda inner: go_on(inner[:2]) & (inner[0] - carry[0] < most), step, (*carry, waiting)
    )
    draft = extend_context(models, weights, waiting, state.draft, begun.lengths)
    return done, spread(models, state._replace(draft=draft))


@functools.partial(jax.jit, static_argnames="models")
def look(models: Models, state: DecodeState) -> DecodeState:
    """Return the state without its caches, whole on every device, for the host to look at."""
    return sharding.constrain(models.mesh, sharding.WHOLE, state._replace(target=(), draft=()))


def decode_block(models: Models, weights: Weights, state: DecodeState) -> DecodeState:
    """Draft, verify, accept and commit one block of every running row (laws 4 to 6)."""
    start = anchor_tokens(state)
    return verify(models, weights, state, start, propose(models, weights, start, state.draft, state.lengths))


def anchor_tokens(state: DecodeState) -> Int[Array, "b 1"]:
    """Return each row's last token, which is not in the caches yet."""
    return jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)


def verify(
    models: Models,
    weights: Weights,
    state: DecodeState,
    anchors: Int[Array, "b 1"],
    drafts: Int[Array, "b {models.block_size-1}"],
) -> DecodeState:
    """Judge the drafts in one pass of the target, and commit what it keeps; features go into the draft's context."""
    judged, features = _judge(models, weights, state, anchors, drafts)
    return judged._replace(draft=extend_context(models, weights, features, state.draft, state.lengths))


def _judge(
    models: Models,
    weights: Weights,
    state: DecodeState,
    anchors: Int[Array, "b 1"],
    drafts: Int[Array, "b {models.block_size-1}"],
) -> tuple[DecodeState, Float[Array, "b {models.block_size} pd"]]:
    block = jnp.concatenate([anchors, drafts], axis=1)
    hidden, features, target = run_target(models, weights, block, state.target, state.lengths)
    judged = masks.positions(state.lengths, models.block_size) + 1
    chosen = choose(target_logits(models, weights, hidden), judged, state.policy)
    return commit(state._replace(target=target), chosen, accepted(chosen, drafts)), features


def propose(
    models: Models, weights: Weights, anchors: Int[Array, "b 1"], cache: Cache, start: Int[Array, "b"]
) -> Int[Array, "b {models.block_size-1}"]:
    """Draft a block in one pass: the anchor, then masks; slots 1 and up propose their argmax (law 4)."""
    config = models.draft
    if config is None or models.block_size == 1:
        return anchors[:, :0]
    masked = jnp.full((anchors.shape[0], models.block_size - 1), config.mask_token_id, anchors.dtype)
    block = jnp.concatenate([anchors, masked], axis=1)
    embedding = (Draft(config), weights.draft) if config.own_embedding else (Target(models.target), weights.target)
    embedded = _apply(*embedding, block, method="embed")
    hidden = _apply(Draft(config), weights.draft, embedded, cache, start)[:, 1:]
    if config.own_vocabulary is not None:
        return _apply(Draft(config), weights.draft, hidden, method="propose")
    return likeliest(adjust_logits(config, target_logits(models, weights, hidden)))


def commit(state: DecodeState, chosen: Int[Array, "b t"], count: Int[Array, "b"]) -> DecodeState:
    """Add a block to every running row: `count` accepted drafts, which equal the target's choices, and one choice more.

    Rejection is arithmetic on `lengths`: the caches' rows past it are hidden, and overwritten by the next block.
    """
    running = state.finish == RUNNING
    emitted = emission(chosen, count + 1, state.stops, state.last - state.lengths)
    slots = jnp.arange(chosen.shape[1], dtype=jnp.int32)
    lengths = state.lengths + jnp.where(running, emitted.length, 0)
    finish = jnp.where(running, _finish(emitted.stopped, emitted.full), state.finish)

    def put(buffer: Array, values: Array, at: Array) -> Array:
        rows = jax.vmap(jax.lax.dynamic_update_slice)(buffer, values.astype(buffer.dtype), at[:, None])
        return jnp.where(running[:, None], rows, buffer)

    return state._replace(
        tokens=put(state.tokens, chosen, state.lengths + 1),
        drafted=put(state.drafted, slots[None] < count[:, None], state.lengths + 1),
        lengths=lengths,
        emitted=put(state.emitted, emitted.length[:, None], state.blocks),
        sizes=put(state.sizes, jnp.full_like(emitted.length, chosen.shape[1])[:, None], state.blocks),
        seen=observe(state.seen, chosen.shape[1], count, running),
        blocks=state.blocks + running,
        finish=finish,
    )


def run_target(
    models: Models, weights: Weights, tokens: Int[Array, "b t"], cache: Cache, start: Int[Array, "b"]
) -> tuple[Float[Array, "b t d"], Float[Array, "b t pd"], Cache]:
    """Run the target over tokens from position `start` on; return hidden states, features, and the longer cache."""
    # The compiler splits all by how weights and rows lie, but for experts, who must be told.
    known = sharding.traced_on(models.mesh) if models.target.has_experts else contextlib.nullcontext()
    with known:
        return _apply(Target(models.target, models.taps), weights.target, tokens, cache, start)


def target_logits(models: Models, weights: Weights, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
    """Score hidden states by the target's head."""
    return _apply(Target(models.target), weights.target, hidden, method="logits")


def extend_context(
    models: Models, weights: Weights, features: Float[Array, "b t pd"], cache: Cache, start: Int[Array, "b"]
) -> Cache:
    """Put the target's features into the draft's context, from position `start` on; without a draft there is none."""
    if models.draft is None:
        return cache
    return _apply(Draft(models.draft), weights.draft, features, cache, start, method="extend")


def _apply(module: nn.Module, params: Params, *inputs: Any, method: str = "__call__") -> Any:
    return module.apply({"params": params}, *inputs, method=method)


def _finish(stopped: Bool[Array, "b"], full: Bool[Array, "b"]) -> Int[Array, "b"]:
    return jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING)).astype(jnp.int32)
