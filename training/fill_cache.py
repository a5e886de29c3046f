"""Running the target over all documents, for a cache of its states."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert import processes
from convert.progress import show
from dflash_jax import sharding
from dflash_jax.parameters import Params
from training import together
from training.data import PackedRows, in_order, on_devices, packed
from training.feature_cache import FeatureCache
from training.step import Task, read_target


def fill(cache: FeatureCache, task: Task, target: Params) -> None:
    """Compute the states of every document whose shard is not there yet; an interrupted one goes on.

    A row for each group of devices at a time: a shard's documents do not fill the rows of a step on a large pod.

    Raises:
        UserError: no room for them, or another run is at it.
    """
    # Others do not look: a host remembers for a while that a file was not there.
    missing = [shard for shard in range(cache.shards) if processes.agree(processes.first() and not cache.has(shard))]
    if not missing:
        return
    at_a_time = sharding.row_groups(task.mesh)
    with contextlib.ExitStack() as stack:
        processes.by_first(lambda: stack.enter_context(cache.filling()))
        for shard in show(missing, len(missing), "computing features"):
            documents = cache.documents(shard)
            rows = packed(cache.prepared, documents, cache.length, 0)
            states: dict[int, dict[str, np.ndarray]] = {}
            for first in range(0, len(rows), at_a_time):
                states |= _states(cache, task, target, rows, range(first, first + at_a_time))
            processes.by_first(lambda: cache.write(shard, [states[int(document)] for document in documents]))  # noqa: B023


def _states(
    cache: FeatureCache, task: Task, target: Params, rows: PackedRows, some: range
) -> dict[int, dict[str, np.ndarray]]:
    """Return the states of the documents in some rows; those past the last are of no one."""
    batch = on_devices(in_order(rows, some.start, len(some), task.mesh), task.mesh)
    found = read_target(task, target, batch)
    states = {}
    for place, i in enumerate(some[: len(rows) - some.start]):
        arrays = {name: together.whole(_row(getattr(found, name), place)) for name in cache.widths}
        at = 0
        for document in rows.rows[i]:
            size = int(cache.sizes(np.array([document]))[0])
            states[document] = {name: array[at : at + size] for name, array in arrays.items()}
            at += size
    return states


@jax.jit
def _row(states: Float[Array, "b s d"], place: Int[Array, ""]) -> Float[Array, "s d"]:
    """Return one row, which is all that moves: indexing would bring all rows to every device."""
    here = jnp.arange(len(states)) == place
    return jnp.where(here[:, None, None], states, 0).sum(axis=0)
