"""Running the target over all documents, for a cache of its states."""

import contextlib

import numpy as np

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
    missing = [shard for shard in range(cache.shards) if processes.agree(not cache.has(shard))]
    if not missing:
        return
    at_a_time = sharding.row_groups(task.mesh)
    with contextlib.ExitStack() as stack:
        together.by_first(lambda: stack.enter_context(cache.filling()))
        for shard in show(missing, len(missing), "computing features"):
            documents = cache.documents(shard)
            rows = packed(cache.prepared, documents, cache.length, 0)
            states: dict[int, dict[str, np.ndarray]] = {}
            for first in range(0, len(rows), at_a_time):
                states |= _states(cache, task, target, rows, range(first, first + at_a_time))
            together.by_first(lambda: cache.write(shard, [states[int(document)] for document in documents]))  # noqa: B023


def _states(
    cache: FeatureCache, task: Task, target: Params, rows: PackedRows, some: range
) -> dict[int, dict[str, np.ndarray]]:
    """Return the states of the documents in some rows; those past the last are of no one."""
    batch = on_devices(in_order(rows, some.start, len(some), task.mesh), task.mesh)
    found = read_target(task, target, batch)
    arrays = {name: together.whole(getattr(found, name)) for name in cache.widths}
    states = {}
    for place, i in enumerate(some):
        at = 0
        for document in rows.rows[i] if i < len(rows) else ():
            size = int(cache.sizes(np.array([document]))[0])
            states[document] = {name: array[place, at : at + size] for name, array in arrays.items()}
            at += size
    return states
