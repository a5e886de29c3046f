"""The target's states on disk, for targets that are dear to run: computed once a document, read at random.

A directory of `manifest.json`, written first, and one raw file for every `SHARD` documents of the prepared data: a row
a token, in the dtype that the target computes in, first its features and then, for losses with a teacher, its last
hidden state. A file is whole or not there, so a cache that was interrupted is filled where it has holes.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convert.files import about, locked, new_file, read_json, write_json
from convert.weights import DTYPES
from dflash_jax.errors import UserError, check
from training.prepared import Prepared

FORMAT_VERSION = 1
MANIFEST, LOCK, PARTIAL = "manifest.json", ".lock", ".partial"
AGAIN = "removing it lets it be computed again"
SHARD = 64  # documents; their states are in memory together, at 40 kB a token for an 8B target


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """States of documents, each cut to `length` tokens. `widths` says how wide each kind of state is."""

    path: Path
    prepared: Prepared
    length: int
    widths: dict[str, int]
    dtype: str

    @property
    def shards(self) -> int:
        """Files that a full cache has."""
        return math.ceil(len(self.prepared) / SHARD)

    def documents(self, shard: int) -> np.ndarray:
        """Return the documents of a shard."""
        return np.arange(shard * SHARD, min((shard + 1) * SHARD, len(self.prepared)))

    def sizes(self, documents: np.ndarray) -> np.ndarray:
        """Return how many tokens of each document there are states of."""
        return np.minimum(self.prepared.lengths[documents], self.length)

    def has(self, shard: int) -> bool:
        """Say whether a shard is there.

        Raises:
            UserError: it is, but has not the size it must have.
        """
        file = self._file(shard)
        if not file.exists():
            return False
        right = int(self.sizes(self.documents(shard)).sum()) * self._width * self._dtype.itemsize
        found = file.stat().st_size
        check(found == right, f"{file}: {found} bytes, and {right} are right; {AGAIN}")
        return True

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Keep other runs from filling it as well, and remove what one that was killed left half written.

        Raises:
            UserError: another run is filling it.
        """
        with contextlib.ExitStack() as stack:
            with about(self.path, "written"):
                stack.enter_context(locked(self.path / LOCK))
                for file in self.path.glob(f"*{PARTIAL}"):
                    file.unlink()
            yield

    def write(self, shard: int, states: list[dict[str, np.ndarray]]) -> None:
        """Write the states of a shard's documents.

        Raises:
            UserError: no room.
        """
        with new_file(self._file(shard)) as partial, partial.open("wb") as opened:
            for document in states:
                joined = np.concatenate([document[name] for name in self.widths], axis=-1)
                opened.write(np.ascontiguousarray(joined, self._dtype).tobytes())

    def read(self, document: int, size: int) -> dict[str, np.ndarray]:
        """Read the states of a document's first `size` tokens, by kind.

        Raises:
            UserError: their file is gone, or shorter than it was.
        """
        shard = document // SHARD
        file, start = self._file(shard), int(self.sizes(np.arange(shard * SHARD, document)).sum())
        try:  # not mapped: a page that cannot be read would end the process without a word
            count, skipped = size * self._width, start * self._width * self._dtype.itemsize
            rows = np.fromfile(file, self._dtype, count, offset=skipped).reshape(size, self._width)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error}); {AGAIN}") from error
        edges = np.cumsum([0, *self.widths.values()])
        return {name: rows[:, edges[i] : edges[i + 1]] for i, name in enumerate(self.widths)}

    def empty(self, length: int) -> dict[str, np.ndarray]:
        """Return zeros for a row of tokens, by kind of state."""
        return {name: np.zeros((length, width), self._dtype) for name, width in self.widths.items()}

    @property
    def _width(self) -> int:
        return sum(self.widths.values())

    @property
    def _dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    def _file(self, shard: int) -> Path:
        return self.path / f"states-{shard:05}.bin"


def open_cache(path: Path, cache_of: dict[str, Any], prepared: Prepared) -> FeatureCache:
    """Open a cache, or begin one where there is none.

    Args:
        path: its directory.
        cache_of: all that its contents follow from: the target's fingerprint, taps, widths, length and dtype.
        prepared: the documents.

    Raises:
        UserError: a cache of something else, named by the field that differs.
    """
    wanted = {"format_version": FORMAT_VERSION, "shard": SHARD, "data_hash": prepared.manifest["data_hash"]} | cache_of
    file = path / MANIFEST
    with about(path, "written"):
        if not file.exists():
            path.mkdir(parents=True, exist_ok=True)
            others = [file.name for file in path.iterdir() if not file.name.endswith(PARTIAL)]
            check(not others, "not a cache of features; a directory of one's own is right")
            with new_file(file) as partial:
                write_json(partial, wanted)
    found = read_json(file)
    for name, value in wanted.items():
        check(
            found.get(name) == value,
            f"--features.cache {path}: {name} is {found.get(name)!r} there and {value!r} here; another directory is "
            "right",
        )
    return FeatureCache(path, prepared, cache_of["length"], cache_of["widths"], cache_of["dtype"])
