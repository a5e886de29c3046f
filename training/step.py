"""One step of training as one program: the target's features, anchors, the draft's blocks, loss, gradients, update.

The frozen target is an argument of its own: nothing is differentiated with respect to it, and it is in neither the
optimizer nor a checkpoint. A batch without a valid anchor, or with a loss that is not finite, changes no parameter.
"""

import ctypes
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jax.stages import Compiled
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import loss as losses
from dflash_jax import reading, sharding
from dflash_jax.anchors import Anchors, among, candidates, draw, label
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft import Draft, adjust_logits
from dflash_jax.heads import score
from dflash_jax.loss import Slots, Sums
from dflash_jax.parameters import Params
from dflash_jax.target import Target
from training import optimizer
from training.config import OptimizerConfig, RunConfig

# Logits that exist at once on a device, float32: 32 MiB, or those of as many slots as make reading a head pay.
MOST_LOGITS, FEWEST_SLOTS = 2**23, 256
# What a run whose loss scores a part of the vocabulary has beside the target's weights; see `training/scored.py`.
SCORED = "scored"


@dataclasses.dataclass(frozen=True)
class Task:
    """What the step's program is compiled for."""

    target: TargetConfig
    draft: DraftConfig
    anchors: int
    loss: str
    gamma: float
    dtype: str
    remat: bool
    optimizer: OptimizerConfig
    steps: int
    mesh: Mesh

    @classmethod
    def of(cls, config: RunConfig, target: TargetConfig, draft: DraftConfig, mesh: Mesh, steps: int) -> "Task":
        """Return what a run's settings ask for."""
        return cls(
            target=target,
            draft=draft,
            anchors=config.train.anchors,
            loss=config.loss.name,
            gamma=config.gamma,
            dtype=config.train.dtype,
            remat=config.train.remat,
            optimizer=config.optimizer,
            steps=steps,
            mesh=mesh,
        )

    @classmethod
    def for_judging(cls, target: TargetConfig, draft: DraftConfig, anchors: int, dtype: str, mesh: Mesh) -> "Task":
        """Return a task of which no step is taken: `anchors` blocks of a row are judged at a time."""
        return cls(
            target=target,
            draft=draft,
            anchors=anchors,
            loss="decay",
            gamma=1.0,
            dtype=dtype,
            remat=False,
            optimizer=OptimizerConfig(),
            steps=1,
            mesh=mesh,
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss asks for the target's logits, and so for all its layers."""
        return self.loss in losses.NEED_TEACHER


class Batch(NamedTuple):
    """Rows of documents. `features`, and `hidden` for a teacher, are None where the target computes them."""

    tokens: Int[Array, "b s"]
    supervised: Bool[Array, "b s"]
    starts: Int[Array, "b s"]
    features: Float[Array, "b s pd"] | None = None
    hidden: Float[Array, "b s d"] | None = None


class TrainState(NamedTuple):
    """All that training changes, float32 but for the counts (law 13)."""

    step: Int[Array, ""]
    params: Params
    moments: Any


class Report(NamedTuple):
    """What a step says of itself, over all devices. `signal` is the highest that a process was given, 0 for none."""

    sums: Sums
    learning_rate: Float[Array, ""]
    grad_norm: Float[Array, ""]
    applied: Bool[Array, ""]
    signal: Int[Array, ""]


def compile_step(task: Task, *arguments: Any) -> Compiled:
    """Compile `train_step` for the rest of its arguments, or for shapes in their place.

    For CPUs it asks for the order that takes least memory. XLA's own lets kernels run side by side, takes twice the
    memory for that, and is no faster: each of these kernels takes all cores anyway.
    """
    lowered = train_step.lower(task, *arguments)
    if task.mesh.devices.flat[0].platform != "cpu":
        return lowered.compile()
    compiled = lowered.compile(compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what compiling has freed, 250 MiB
        give_back(0)
    return compiled


@functools.partial(jax.jit, static_argnames="task", donate_argnames="state")
def train_step(
    task: Task, target: Params, state: TrainState, batch: Batch, seed: Int[Array, ""], signals: Int[Array, "devices"]
) -> tuple[TrainState, Report]:
    """Take one step; its random numbers follow from the seed and the number of the step.

    Processes that share a run learn here, all at the same step, that one of them is asked to end: `signals` holds what
    each device's process was given.
    """
    batch = read_target(task, target, batch)
    with sharding.traced_on(task.mesh):
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        anchors = draw(key, candidates(batch.supervised, batch.starts), task.anchors)
        sums, gradients = loss_and_gradients(task, target, state.params, batch, anchors)
    norm = optimizer.norm(gradients)
    updates, moments = optimizer.build(task.optimizer, task.steps).update(gradients, state.moments, state.params)
    applied = (sums.weight > 0) & jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    params, moments = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old),
        (optax.apply_updates(state.params, updates), moments),
        (state.params, state.moments),
    )
    rate = optimizer.schedule(task.optimizer, task.steps)(optimizer.updates_of(state.moments))
    after = TrainState(state.step + 1, params, moments)
    after = jax.lax.with_sharding_constraint(after, sharding.shardings(task.mesh, after))
    report = Report(sums, rate, norm, applied, signals.max())
    return after, sharding.constrain(task.mesh, sharding.WHOLE, report)


@functools.partial(jax.jit, static_argnames="task")
def read_target(task: Task, target: Params, batch: Batch) -> Batch:
    """Let the target compute features, and hidden states for a teacher, where the batch does not bring them."""
    if batch.features is not None:
        return batch
    with sharding.traced_on(task.mesh):
        features, hidden = reading.read(
            task.target, task.draft.target_layer_ids, target, batch.tokens, batch.starts, task.needs_teacher
        )
    return batch._replace(features=features, hidden=hidden)


def loss_and_gradients(
    task: Task, target: Params, params: Params, batch: Batch, anchors: Anchors
) -> tuple[Sums, Params]:
    """Return sums over all blocks of a batch whose features are there, and the gradients of the loss."""
    outputs, pull_back = jax.vjp(lambda tree: draft_blocks(task, target, tree, batch, anchors), params)
    sums, d_outputs = _heads(task, target, batch, anchors, outputs)
    [gradients] = pull_back((d_outputs / jnp.maximum(sums.weight, 1e-6)).astype(outputs.dtype))
    return sums, gradients


def draft_blocks(task: Task, target: Params, params: Params, batch: Batch, anchors: Anchors) -> Float[Array, "b m t d"]:
    """Run the draft over all blocks, in the compute dtype; slot 0's states mean nothing."""
    config = task.draft
    first = jnp.take_along_axis(batch.tokens, anchors.positions, axis=1)[..., None]
    slots = jnp.pad(first, ((0, 0), (0, 0), (0, config.block_size - 1)), constant_values=config.mask_token_id)
    b, m, t = slots.shape
    embedded = _apply(Target(task.target), target, slots.reshape(b, m * t), method="embed").reshape(b, m, t, -1)
    features, embedded = jax.tree.map(lambda array: array.astype(task.dtype), (batch.features, embedded))
    return _apply(
        Draft(config), params, embedded, anchors, features, batch.starts, method="over_blocks", remat=task.remat
    )


def block_sums(task: Task, target: Params, batch: Batch, anchors: Anchors, outputs: Float[Array, "b m t d"]) -> Sums:
    """Return the training loss's sums over blocks whose logits fit all at once."""
    slots = block_slots(task, target, batch, anchors, outputs, scored=target.get(SCORED))
    return losses.sums(losses.LOSSES[task.loss], task.gamma, slots)


def block_slots(
    task: Task,
    target: Params,
    batch: Batch,
    anchors: Anchors,
    outputs: Float[Array, "b m t d"],
    *,
    scored: Params | None = None,
) -> Slots:
    """Return slots 1…t-1 of b*m blocks with their logits, and the teacher's where there is one.

    Of all the vocabulary, or of the part in `scored`; tokens are then rows of it.
    """
    labels = label(batch.tokens, batch.supervised, batch.starts, anchors, task.draft.block_size)
    if scored is not None:
        labels = among(labels, scored["rows"], scored["head"].shape[1])

    def logits(hidden: Float[Array, "b m u d"]) -> Float[Array, "c u v"]:
        b, m, u, d = hidden.shape
        states = hidden.reshape(b, m * u, d)
        if scored is None:
            found = _apply(Target(task.target), target, states, method="logits")
        else:
            found = score(states, scored["head"], "dv")
        return found.reshape(b * m, u, -1)

    tokens, weighted = (array.reshape(-1, array.shape[-1]) for array in labels)
    teacher = logits(_spoken(batch.hidden, anchors, task.draft.block_size)) if batch.hidden is not None else None
    return Slots(adjust_logits(task.draft, logits(outputs[:, :, 1:])), tokens, weighted, teacher)


def _heads(
    task: Task, target: Params, batch: Batch, anchors: Anchors, outputs: Float[Array, "b m t d"]
) -> tuple[Sums, Float[Array, "b m t d"]]:
    """Return sums over all blocks, and the gradient of their undivided loss with respect to the draft's outputs.

    A few blocks of each row at a time, and each time forward and backward at once, so that logits are computed once and
    soon forgotten.
    """
    target, vocabulary = _with_gathered_head(task, target)

    def piece(total: Sums, part: tuple[Anchors, Array]) -> tuple[Sums, Array]:
        some, states = part

        def objective(states: Array) -> tuple[Array, Sums]:
            sums = block_sums(task, target, batch, some, states)
            return sums.loss, sums

        (_, sums), gradient = jax.value_and_grad(objective, has_aux=True)(states)
        return jax.tree.map(jnp.add, total, sums), gradient

    empty = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: block_sums(task, target, batch, anchors, outputs)),
    )
    sums, gradient = jax.lax.scan(piece, empty, cut_blocks(task, anchors, outputs, vocabulary))
    return sums, joined_blocks(gradient, outputs.shape[1])


def _with_gathered_head(task: Task, target: Params) -> tuple[Params, int]:
    """Gather over `fsdp` the head that the loss scores with; return its rows, too."""
    if scored := target.get(SCORED):
        head = sharding.gathered(f"{SCORED}/head", scored["head"])
        return target | {SCORED: scored | {"head": head}}, head.shape[1]
    name = "embedding" if task.target.tie_word_embeddings else "head"
    return target | {name: sharding.gathered(name, target[name])}, task.target.vocab_size


def cut_blocks(
    task: Task, anchors: Anchors, outputs: Float[Array, "b m t d"], vocabulary: int
) -> tuple[Anchors, Array]:
    """Cut each row's blocks, along a new first axis, into pieces whose logits of a vocabulary may exist at once."""
    b, m, t, _ = outputs.shape
    most = max(MOST_LOGITS // vocabulary, FEWEST_SLOTS) * task.mesh.size
    pieces = min(m, math.ceil(b * m * (t - 1) / most))

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, -m % pieces), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(b, pieces, -1, *array.shape[2:]), 1, 0)

    return Anchors(*map(cut, anchors)), cut(outputs)


def joined_blocks(pieces: Array, blocks: int) -> Array:
    """Undo `cut_blocks`."""
    joined = jnp.moveaxis(pieces, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :blocks]


def _spoken(hidden: Float[Array, "b s d"], anchors: Anchors, t: int) -> Float[Array, "b m u d"]:
    """Return the target's states that slots 1…t-1 learn from: slot k's stands at position a+k-1 (law 11)."""
    at = anchors.positions[..., None] + jnp.arange(t - 1, dtype=anchors.positions.dtype)[None, None]
    at = jnp.minimum(at, hidden.shape[1] - 1)
    return jax.vmap(lambda row, index: row[index])(hidden, at)


def _apply(module: nn.Module, params: Params, *inputs: Any, method: str, **options: Any) -> Any:
    return module.apply({"params": params}, *inputs, method=method, **options)
