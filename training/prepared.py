"""Prepared rows on disk: written shard by shard, read at random.

A directory of `manifest.json`, written last, `index.npy` and ArrayRecord shards `rows-00000.array_record`, one record a
row (`group_size:1`), in the order of the input. A record is, little-endian: the number n of tokens as uint32, n token
ids as int32, and n bits, the first one lowest, that say which tokens are supervised. The index is int64 [3, rows]: each
row's tokens, how many of them are supervised, and the line of the input that it came from. Until the manifest is there,
each shard has a `rows-00000.json` beside it, which says what it was made from.
"""

import collections
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from convert.files import about, about_values, new_file, read_json, sha256
from convert.sources import Source
from dflash_jax.errors import UserError, check

FORMAT_VERSION = 1
MANIFEST, INDEX, PARTIAL = "manifest.json", "index.npy", ".partial"
OURS = re.compile(r"manifest\.json|index\.npy|rows-\d{5,}\.(array_record|json)|.*\.partial")
# Each holds a file open, of which a process may often have no more than 1,024; opening one again takes 0.2 ms.
OPEN_READERS = 128
AGAIN = "preparing again, into another directory, is right"


class Row(NamedTuple):
    """One document: token ids, int32 [n], and which of them are supervised, bool [n]."""

    tokens: np.ndarray
    supervised: np.ndarray


class Prepared:
    """The rows of a finished directory, for any number of threads.

    It may be pickled for processes that are spawned. In one that is forked, ArrayRecord's threads are missing, and
    reading ends the process.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], index: np.ndarray) -> None:
        self.path, self.manifest = path, manifest
        self.lengths, self.supervised, self.lines = index
        self._starts = np.cumsum([0, *(shard["rows"] for shard in manifest["shards"])])
        self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        """Read a row.

        Raises:
            UserError: its shard is missing or damaged.
        """
        index = range(len(self))[index]
        shard = int(np.searchsorted(self._starts, index, "right")) - 1
        file = self.path / self.manifest["shards"][shard]["name"]
        try:
            row = _decode(self._reader(shard, file).read([index - int(self._starts[shard])])[0])
        except (RuntimeError, LookupError, ValueError) as error:
            raise UserError(f"{file}: row {index} cannot be read ({error}); {AGAIN}") from error
        found = len(row.tokens), int(row.supervised.sum())
        check(
            found == (self.lengths[index], self.supervised[index]),
            f"{file}: row {index} is not the one in {INDEX}; {AGAIN}",
        )
        return row

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _readers=collections.OrderedDict(), _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"Prepared({str(self.path)!r}, {len(self)} rows)"

    @property
    def tokenizer_hash(self) -> str:
        """What `tokenizer_hash` says of the tokenizer that the rows were made with."""
        return str(self.manifest["tokenizer_hash"])

    def _reader(self, shard: int, file: Path) -> Any:
        with self._lock:
            if shard not in self._readers:
                # A reader that another thread still uses closes when that thread lets go of it.
                while len(self._readers) >= OPEN_READERS:
                    self._readers.popitem(last=False)
                self._readers[shard] = ArrayRecordReader(str(file), options="readahead_buffer_size:0")
            self._readers.move_to_end(shard)
            return self._readers[shard]


def open_prepared(path: str | Path) -> Prepared:
    """Open a directory that `training.prepare` wrote.

    Raises:
        UserError: not there, not finished, of another format, or with a file that is missing or not what was written.
    """
    path = Path(path)
    check(path.is_dir(), f"{path}: no such directory; one that `python -m training.prepare` wrote is right")
    file = path / MANIFEST
    check(
        file.is_file(), f"{path}: no {MANIFEST} in it; a directory that `python -m training.prepare` finished is right"
    )
    manifest = read_json(file)
    version = manifest.get("format_version")
    check(version == FORMAT_VERSION, f"{file}: format_version {version!r} is not supported; {FORMAT_VERSION} is")
    with about_values(file):
        rows = sum(shard["rows"] for shard in manifest["shards"])
        expected = [(path / shard["name"], shard["bytes"]) for shard in manifest["shards"]]
        index_hash = manifest["index_hash"]
    for shard, size in expected:
        check(shard.is_file(), f"{shard}: missing; {AGAIN}")
        found = shard.stat().st_size
        check(found == size, f"{shard}: {found} bytes, and {size} were written; {AGAIN}")
    with about(path / INDEX):
        content = (path / INDEX).read_bytes()
        check(hashlib.sha256(content).hexdigest() == index_hash, f"not the index that was written; {AGAIN}")
        index = np.load(io.BytesIO(content), allow_pickle=False)
        check(index.shape == (3, rows), f"{index.shape[-1]} rows, and the shards hold {rows}; {AGAIN}")
    return Prepared(path, manifest, index)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a digest of what a transformers tokenizer makes of text, wherever it was loaded from."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # What the last call asked for.
    content = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    return _digest(content)


def template_hash(tokenizer: Any) -> str:
    """Return a digest of a transformers tokenizer's chat template, or of none."""
    return _digest(tokenizer.chat_template)


def write_shard(
    directory: Path, number: int, made_from: str, rows: Iterable[tuple[int, Sequence[int], Sequence[bool]]]
) -> None:
    """Write a shard, which appears whole or not at all.

    Args:
        directory: where.
        number: which shard it is.
        made_from: what `is_written` is asked about later.
        rows: the line of each, its token ids, and whether they are supervised.

    Raises:
        UserError: no room, or whatever else the file system objects to.
    """
    file, counts = _shard(directory, number), []
    with new_file(file) as partial:
        writer = ArrayRecordWriter(str(partial), "group_size:1")
        try:
            for line, tokens, supervised in rows:
                counts.append((len(tokens), sum(supervised), line))
                writer.write(_encode(tokens, supervised))
        finally:
            try:
                writer.close()
            except RuntimeError as error:
                raise OSError(str(error)) from error
        note = {"made_from": made_from, "name": file.name, "bytes": partial.stat().st_size, "sha256": sha256(partial)}
    _write(_note(file), json.dumps(note | {"index": counts}).encode())


def is_written(directory: Path, number: int, made_from: str) -> bool:
    """Say whether a shard is there, whole, and made from the same."""
    file = _shard(directory, number)
    try:
        note = json.loads(_note(file).read_bytes())
        return bool(note["made_from"] == made_from and note["bytes"] == file.stat().st_size)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def finish(directory: Path, shards: int, facts: dict[str, Any]) -> None:
    """Write index and manifest of shards that are all there, and remove what is no part of them.

    Raises:
        UserError: as `write_shard`.
    """
    notes = [json.loads(_note(_shard(directory, number)).read_bytes()) for number in range(shards)]
    index = np.concatenate([np.array(note["index"], np.int64).reshape(-1, 3) for note in notes]).T
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(index))
    _write(directory / INDEX, buffer.getvalue())
    described = [
        {"name": note["name"], "rows": len(note["index"]), "bytes": note["bytes"], "sha256": note["sha256"]}
        for note in notes
    ]
    manifest = {
        "format_version": FORMAT_VERSION,
        **facts,
        "counts": {
            "rows": len(np.unique(index[2])),
            "documents": index.shape[1],
            "tokens": int(index[0].sum()),
            "supervised_tokens": int(index[1].sum()),
        },
        "data_hash": _digest([shard["sha256"] for shard in described]),
        "index_hash": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "shards": described,
    }
    _write(directory / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())
    keep = {MANIFEST, INDEX, *(note["name"] for note in notes)}
    for file in directory.iterdir():
        if OURS.fullmatch(file.name) and file.name not in keep:
            file.unlink()


def sweep(directory: Path) -> None:
    """Remove what was not written whole."""
    for file in directory.glob(f"*{PARTIAL}"):
        file.unlink(missing_ok=True)


def _encode(tokens: Sequence[int], supervised: Sequence[bool]) -> bytes:
    bits = np.packbits(np.array(supervised, bool), bitorder="little")
    return np.array([len(tokens), *tokens], "<i4").tobytes() + bits.tobytes()


def _decode(record: bytes) -> Row:
    count = int(np.frombuffer(record, "<i4", 1)[0])
    tokens = np.frombuffer(record, "<i4", count, 4).astype(np.int32)
    bits = np.frombuffer(record, np.uint8, offset=4 + 4 * count)
    return Row(tokens, np.unpackbits(bits, count=count, bitorder="little").astype(bool))


def _shard(directory: Path, number: int) -> Path:
    return directory / f"rows-{number:05}.array_record"


def _note(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _write(file: Path, content: bytes) -> None:
    with new_file(file) as partial:
        partial.write_bytes(content)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_tokenizer(prepared: Prepared, source: Source) -> None:
    """Refuse data that was prepared for another tokenizer.

    Raises:
        UserError: naming the data.
    """
    check(
        tokenizer_hash(source.tokenizer()) == prepared.tokenizer_hash,
        f"--data {prepared.path}: prepared with the tokenizer of {prepared.manifest['target']}, which is not that of "
        f"{os.fspath(source.path)}; preparing it for this target is right",
    )
