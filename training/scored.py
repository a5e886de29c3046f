"""The part of the vocabulary that a run's loss scores: the tokens that answers have most often.

What a draft is for may use a few thousand tokens, and the head is most of a small draft's step. Evaluation and decoding
score the whole vocabulary.
"""

import functools
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from convert.progress import show, tell
from dflash_jax import sharding
from dflash_jax.parameters import Params
from training import together
from training.data import READ_AHEAD, READERS, PackedRows
from training.step import SCORED, Task

COUNTED = 1024  # documents at a time


def part_of_head(size: int, task: Task, target: Params, rows: PackedRows) -> Params:
    """Return what the step takes beside the target's weights, on the mesh.

    Args:
        size: how many tokens are scored.
        task: the step's.
        target: weights, of which the head is read.
        rows: all that is trained on.

    Returns:
        `head` [d, size], and `rows` [v]: each token's place in it, `size` where it has none.
    """
    vocabulary, tied = task.target.vocab_size, task.target.tie_word_embeddings
    counts = together.total(count(rows, vocabulary))
    tokens = choose(counts, size)
    share = counts[tokens].sum() / max(counts.sum(), 1)
    tell(f"the loss scores {size} of {vocabulary} tokens, which are {share:.2%} of what answers say")
    places = np.full(vocabulary, size, np.int32)
    places[tokens] = np.arange(size)
    where = NamedSharding(task.mesh, sharding.parameter_spec(f"{SCORED}/head"))
    take = jax.jit(functools.partial(_take, tied=tied), out_shardings=where)
    head = take(target["embedding" if tied else "head"], tokens.astype(np.int32))
    return {"head": head, "rows": sharding.place(task.mesh, (SCORED, "rows"), places)}


def count(rows: PackedRows, vocabulary: int) -> Int[np.ndarray, "v"]:
    """Return how often the answers in some rows have each token; each process reads its share, once, in order of files.

    Raises:
        UserError: a shard is missing or damaged.
    """
    documents = np.sort(np.concatenate(rows.rows))[jax.process_index() :: jax.process_count()]

    def counted(first: int) -> np.ndarray:
        some = (rows.prepared[int(document)] for document in documents[first : first + COUNTED])
        said = [row.tokens[: rows.length][row.supervised[: rows.length]] for row in some]
        return np.bincount(np.concatenate(said), minlength=vocabulary)

    firsts = grain.MapDataset.range(0, len(documents), COUNTED)
    options = grain.ReadOptions(num_threads=READERS, prefetch_buffer_size=READ_AHEAD)
    parts: Iterator[np.ndarray] = show(firsts.map(counted).to_iter_dataset(options), len(firsts), "counting tokens")
    return sum(parts, np.zeros(vocabulary, np.int64))


def choose(counts: Int[np.ndarray, "v"], size: int) -> Int[np.ndarray, "size"]:
    """Return the tokens that are scored, in rising order: the most frequent, of equals the first.

    Where answers have fewer, others fill up, evenly spread: a draft learns not to say what no answer says, too.

    Example:
        >>> choose(np.array([0, 5, 0, 0, 7, 0, 1]), 2).tolist(), choose(np.array([0, 5, 0, 0, 7, 0, 1]), 5).tolist()
        ([1, 4], [0, 1, 3, 4, 6])
    """
    said = np.argsort(-counts, kind="stable")[: min(size, np.count_nonzero(counts))]
    others = np.flatnonzero(counts == 0)
    missing = size - len(said)
    return np.sort(np.concatenate([said, others[np.arange(missing) * len(others) // max(missing, 1)]]))


def _take(head: Float[Array, "..."], tokens: Int[Array, "size"], *, tied: bool) -> Float[Array, "d size"]:
    return head[tokens].T if tied else head[:, tokens]
