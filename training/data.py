"""Prepared documents as batches: packed into rows, in an order that follows from the seed, at an exact position.

Of each batch a process reads the rows that its own devices hold. Order and position are those of the whole, whatever
the devices, so a run goes on at its place on others.
"""

import dataclasses
from collections.abc import Sequence

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dflash_jax import sharding
from dflash_jax.errors import check
from training.feature_cache import FeatureCache
from training.packing import pack
from training.prepared import Prepared
from training.step import Batch

READ_AHEAD = 4  # batches
READERS = 4  # threads


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of `length` tokens, read at random. What fills a row up is a document of its own, without supervision."""

    prepared: Prepared
    rows: Sequence[Sequence[int]]
    length: int
    cache: FeatureCache | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Read a row: `tokens`, `supervised`, and `starts` of each position's document. Row -1 has no document."""
        tokens, supervised = np.zeros(self.length, np.int32), np.zeros(self.length, bool)
        starts = np.zeros(self.length, np.int32)
        states = self.cache.empty(self.length) if self.cache else {}
        at = 0
        for document in self.rows[index] if index >= 0 else ():
            row = self.prepared[document]
            size = min(len(row.tokens), self.length)
            here = slice(at, at + size)
            tokens[here], supervised[here], starts[here] = row.tokens[:size], row.supervised[:size], at
            if self.cache:
                for name, values in self.cache.read(document, size).items():
                    states[name][here] = values
            at += size
        starts[at:] = at
        return {"tokens": tokens, "supervised": supervised, "starts": starts} | states

    def size(self, index: int) -> int:
        """Return how many tokens a row has, without those that fill it up."""
        return int(np.minimum(self.prepared.lengths[self.rows[index]], self.length).sum()) if index >= 0 else 0

    def lines(self, index: int) -> list[int]:
        """Return the lines of the input that a row's documents came from."""
        return [int(self.prepared.lines[document]) for document in self.rows[index]]

    @property
    def documents(self) -> int:
        """How many documents the rows hold."""
        return sum(map(len, self.rows))

    @property
    def padding(self) -> float:
        """The share of the rows that fills them up."""
        return 1 - sum(map(self.size, range(len(self)))) / (len(self) * self.length)


def packed(
    prepared: Prepared, documents: np.ndarray, length: int, seed: int, cache: FeatureCache | None = None
) -> PackedRows:
    """Pack some of the documents into rows."""
    rows = pack(prepared.lengths[documents], length, seed)
    return PackedRows(prepared, [[int(documents[i]) for i in row] for row in rows], length, cache)


def steps_of(rows: int, batch_size: int, epochs: int) -> int:
    """Return how many steps the epochs have.

    Raises:
        UserError: less than one.
    """
    steps = rows * epochs // batch_size
    check(
        steps > 0,
        f"--train.batch-size: {batch_size} rows a step, and {rows} rows in {epochs} epochs make none; fewer is right",
    )
    return steps


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A batch on the host: which rows it is made of, and the contents of those that this process's devices hold."""

    indices: np.ndarray
    contents: dict[str, np.ndarray]


def batches(rows: PackedRows, batch_size: int, seed: int, mesh: Mesh) -> grain.DatasetIterator:
    """Return an endless iterator over batches, each epoch in another order; its state is the last one taken."""
    order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)
    dataset = order.map(lambda indices: drawn(rows, indices, mesh))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=READERS, prefetch_buffer_size=READ_AHEAD)))


def drawn(rows: PackedRows, indices: np.ndarray, mesh: Mesh) -> Drawn:
    """Read what this process needs of a batch; row -1 is one without documents."""
    elements = [rows[int(indices[place])] for place in places(mesh, len(indices))]
    return Drawn(indices, {name: np.stack([element[name] for element in elements]) for name in elements[0]})


def in_order(rows: PackedRows, first: int, batch_size: int, mesh: Mesh) -> Drawn:
    """Read a batch of consecutive rows; those past the last are without documents."""
    indices = np.arange(first, first + batch_size)
    return drawn(rows, np.where(indices < len(rows), indices, -1), mesh)


def places(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return which rows of a batch this process's devices hold."""
    held = NamedSharding(mesh, sharding.TRAINED_ROWS).addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in held.values() if index is not None]))


def on_devices(batch: Drawn, mesh: Mesh) -> Batch:
    """Spread a batch over the devices of all processes."""
    size = len(batch.indices)
    mine, where = places(mesh, size), NamedSharding(mesh, sharding.TRAINED_ROWS)

    def spread(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            return array[np.searchsorted(mine, np.arange(size)[index[0] if index else slice(None)])]

        return jax.make_array_from_callback((size, *array.shape[1:]), where, part)

    return Batch(**{name: spread(array) for name, array in batch.contents.items()})
