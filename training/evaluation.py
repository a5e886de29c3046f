"""How well a draft would be accepted, by the training forward: at anchors, and along answers as decoding walks them."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax import sharding
from dflash_jax.anchors import Anchors
from dflash_jax.loss import LOSSES, Sums, sums
from dflash_jax.parameters import Params
from dflash_jax.sampling import likeliest
from training.step import Batch, Task, block_slots, cut_blocks, draft_blocks, joined_blocks, read_target


class Judged(NamedTuple):
    """What became of slots 1…t-1 of each block: `right` if the draft says the token that stands there."""

    sums: Sums
    right: Bool[Array, "b m u"]
    weighted: Bool[Array, "b m u"]


@functools.partial(jax.jit, static_argnames="task")
def judge(task: Task, target: Params, params: Params, batch: Batch, anchors: Anchors) -> Judged:
    """Run the draft over blocks, without gradients."""
    batch = read_target(task, target, batch)

    def piece(part: tuple[Anchors, Array]) -> Judged:
        slots = block_slots(task, target, batch, *part)
        right = (likeliest(slots.logits) == slots.tokens) & slots.weighted
        shape = (*part[0].positions.shape, -1)
        return Judged(sums(LOSSES[task.loss], task.gamma, slots), right.reshape(shape), slots.weighted.reshape(shape))

    with sharding.traced_on(task.mesh):
        outputs = draft_blocks(task, target, params, batch, anchors)
        pieces = jax.lax.map(piece, cut_blocks(task, anchors, outputs, task.target.vocab_size))
    right, weighted = (joined_blocks(array, anchors.positions.shape[1]) for array in pieces[1:])
    added = jax.tree.map(lambda leaf: leaf.sum(axis=0), pieces.sums)
    return Judged(sharding.constrain(task.mesh, sharding.WHOLE, added), right, weighted)


def walk(accepted: dict[int, int], supervised: np.ndarray) -> list[int]:
    """Return the tokens emitted a block if decoding had given each supervised run of a document (law 12).

    Args:
        accepted: drafts accepted at each position that may be an anchor.
        supervised: which tokens of the document are answers.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(np.int8)))
    emitted = []
    for start, end in edges.reshape(-1, 2).tolist():
        anchor, last = start, end - 1
        while anchor < last:
            # The answer's end cuts a block, as a stop token or a cap does.
            emitted.append(min(accepted[anchor] + 1, last - anchor))
            anchor += emitted[-1]
    return emitted
