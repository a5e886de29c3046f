"""The headers of safetensors files: one file, or shards that an index lists. No data is read."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from convert.files import about, read_json, unique
from convert.names import Shape
from convert.shards import INDEX, SINGLE
from dflash_jax.errors import UserError, check

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file's header says of one tensor. `start` is where its data begins in the file."""

    file: Path
    shape: Shape
    dtype: str
    start: int


def read_headers(directory: Path) -> dict[str, Header]:
    """Return every tensor's header, by name.

    Raises:
        UserError: no weights, a file that is not whole, or an index that does not fit its shards.
    """
    return _read_index(directory) if _is_sharded(directory) else _read_file(directory / SINGLE)


def _is_sharded(path: Path) -> bool:
    if (path / SINGLE).exists():
        return False
    if (path / INDEX).exists():
        return True
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    check(
        not pickles,
        f"{path}: no {SINGLE}, only {', '.join(pickles)}, and pickle files are never loaded; the same weights in "
        "safetensors are right",
    )
    raise UserError(f"{path}: no weights in it; {SINGLE}, or {INDEX} and its shards, is right")


def _read_file(file: Path) -> dict[str, Header]:
    check(file.is_file(), f"{file}: no such file")
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library has checked the header; what it does not tell is whether a name is there twice
        with about(file), file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length), object_pairs_hook=unique)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); a complete one is right") from error
    return {
        name: Header(file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_index(path: Path) -> dict[str, Header]:
    index = path / INDEX
    listing = read_json(index).get("weight_map")
    with about(index):
        if not isinstance(listing, dict) or not listing:
            raise UserError("no weight_map; an object of tensor names and their shards is right")
        outside = sorted({str(shard) for shard in listing.values() if not _is_shard_name(shard)})
        check(not outside, f"{', '.join(outside)}: not a shard's name; a .safetensors file beside the index is right")
        shards = sorted(set(listing.values()))
        absent = [shard for shard in shards if not (path / shard).is_file()]
        check(not absent, f"names {', '.join(absent)}, which is not there; every shard beside the index is right")
    inside = {shard: _read_file(path / shard) for shard in shards}
    faults = [f"{name} is not in {shard}" for name, shard in listing.items() if name not in inside[shard]]
    faults += [
        f"{name} is in {shard}, and the index {'puts it in ' + listing[name] if name in listing else 'lacks it'}"
        for shard, headers in inside.items()
        for name in headers
        if listing.get(name) != shard
    ]
    check(not faults, f"{index}: does not fit its shards: {'; '.join(faults)}")
    return {name: inside[shard][name] for name, shard in listing.items()}


def _is_shard_name(shard: Any) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
