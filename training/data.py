"""Prepared documents as batches: packed into rows, in an order that follows from the seed, at an exact position."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

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
        """Read a row: `tokens`, `supervised` and `starts` (of each position's document), `row` and `size`, its tokens.

        Row -1 is one without a document.
        """
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
        return {
            "tokens": tokens,
            "supervised": supervised,
            "starts": starts,
            "row": np.asarray(index),
            "size": np.asarray(at),
        } | states

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
        sizes = np.minimum(self.prepared.lengths, self.length)
        return 1 - sum(int(sizes[row].sum()) for row in map(list, self.rows)) / (len(self.rows) * self.length)


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


def batches(rows: PackedRows, batch_size: int, seed: int) -> grain.DatasetIterator:
    """Return an endless iterator over batches, each epoch in another order; its state is the last one taken."""
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(batch_size)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=READERS, prefetch_buffer_size=READ_AHEAD)))


def stacked(rows: PackedRows, some: range) -> dict[str, np.ndarray]:
    """Return some of the rows as an element of `batches`; those past the last are without documents."""
    elements = [rows[i if i < len(rows) else -1] for i in some]
    return {name: np.stack([element[name] for element in elements]) for name in elements[0]}


def to_batch(element: dict[str, Any]) -> Batch:
    """Make an element of `batches` what the step takes; on the host still."""
    return Batch(
        element["tokens"], element["supervised"], element["starts"], element.get("features"), element.get("hidden")
    )
