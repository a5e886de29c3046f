"""Hugging Face directories: config.json beside safetensors, in one file or sharded by an index.

Published DFlash drafts have the same form. Pickle files are never loaded, nor is code.
"""

import dataclasses
import functools
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from convert import names, tokenizer_files, weights
from convert.files import about, read_json, unique
from dflash_jax.config import DraftConfig, TargetConfig, token_ids
from dflash_jax.errors import UserError, check

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
STORED = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
PRUNED = ("d2t", "t2d")
LEGACY_BUFFER = "rotary_emb.inv_freq"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file's header says of one tensor."""

    file: Path
    shape: names.Shape
    dtype: str


class HuggingFaceSource:
    """A directory as transformers writes it. Only headers are read until `arrays` is called."""

    format = "Hugging Face directory"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_name = str(path / "config.json")
        check(
            (path / "config.json").is_file(),
            f"{path}: no config.json in it; a Hugging Face directory (config.json and {SINGLE}), a checkpoint that "
            "`python -m convert to-flax` wrote, or a .gguf file is right",
        )
        self.hf_config = read_json(path / "config.json")

    @functools.cached_property
    def headers(self) -> dict[str, Header]:
        """Every tensor's header, by name; buffers that old files keep of what the config says are left out."""
        headers = _read_index(self.path) if _is_sharded(self.path) else _read_header(self.path / SINGLE)
        return {name: header for name, header in headers.items() if not name.endswith(LEGACY_BUFFER)}

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse tensors that are not those of the config, or of a dtype that is not supported."""
        headers = self.headers
        with about(self.path):
            pruned = [name for name in PRUNED if name in headers]
            check(
                not pruned,
                f"{', '.join(pruned)}: drafts with a pruned vocabulary are not supported; one with the target's "
                "whole vocabulary is",
            )
            shapes = {name: header.shape for name, header in headers.items()}
            if self._stores_tied_head(config):
                shapes.pop(HEAD)
            names.check_shapes(shapes, self._wanted(config))
            odd = [f"{name} ({header.dtype})" for name, header in headers.items() if header.dtype not in STORED]
            check(not odd, f"tensors of a dtype that is not supported: {', '.join(odd)}; {', '.join(STORED)} are")

    def dtypes(self) -> list[str]:
        """Return the dtypes that are stored, by name."""
        return sorted({STORED[header.dtype].name for header in self.headers.values()})

    def arrays(self, config: TargetConfig | DraftConfig, dtype: np.dtype | None) -> weights.Arrays:
        """Yield every parameter, one at a time.

        Raises:
            UserError: a file that cannot be read, or a stored head that is not the embedding it is tied to.
        """
        if self._stores_tied_head(config):
            self._check_tied_head()
        for name, tensor in self._wanted(config).items():
            kind = weights.loaded_dtype(dtype, STORED[self.headers[name].dtype], f"{self.path}: {name}")
            yield tensor.path, weights.assemble(self._blocks(name), tensor, kind)

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the stops that the generation config adds."""
        file = self.path / GENERATION
        if not file.is_file():
            return ()
        generation = read_json(file)
        with about(file):
            return token_ids(generation.get("eos_token_id"), "eos_token_id")

    def tokenizer(self) -> Any:
        """Load the tokenizer that lies beside the weights."""
        return tokenizer_files.load(self.path)

    def has_chat_template(self) -> bool:
        """Say whether a chat template lies beside the weights."""
        return tokenizer_files.has_chat_template(self.path)

    def files(self) -> list[Path]:
        """Return the files that make up the checkpoint."""
        weight_files = {header.file for header in self.headers.values()}
        beside = [self.path / name for name in ("config.json", GENERATION, INDEX, *tokenizer_files.NAMES)]
        return sorted(weight_files | {file for file in beside if file.is_file()})

    def save_companions(self, directory: Path) -> None:
        """Copy the tokenizer's files and the generation config into a directory."""
        for name in (*tokenizer_files.NAMES, GENERATION):
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, directory / name)

    def _wanted(self, config: TargetConfig | DraftConfig) -> dict[str, names.Tensor]:
        return names.expected(config, names.published_layout(config))

    def _blocks(self, name: str) -> Iterator[np.ndarray]:
        header = self.headers[name]
        try:
            # Mapped anew for each tensor, so that the pages of those already read do not stay.
            with safe_open(header.file, framework="numpy") as opened:
                rows = opened.get_slice(name)
                for block in weights.row_blocks(header.shape):
                    yield rows[block]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{header.file}: {name} cannot be read ({error}); a complete file is right") from error

    def _stores_tied_head(self, config: TargetConfig | DraftConfig) -> bool:
        tied = isinstance(config, TargetConfig) and config.tie_word_embeddings
        return tied and HEAD in self.headers and EMBEDDING in self.headers

    def _check_tied_head(self) -> None:
        head, embedding = self.headers[HEAD], self.headers[EMBEDDING]
        same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
            np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
            for ours, theirs in zip(self._blocks(HEAD), self._blocks(EMBEDDING), strict=True)
        )
        check(
            same,
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but {self.config_name} ties them; tie_word_embeddings "
            "false, or no head of its own, is right",
        )


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


def _read_header(file: Path) -> dict[str, Header]:
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
        name: Header(file, tuple(entry["shape"]), entry["dtype"])
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
    inside = {shard: _read_header(path / shard) for shard in shards}
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
