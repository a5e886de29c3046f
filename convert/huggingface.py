"""Hugging Face directories: config.json beside safetensors, in one file or sharded by an index.

Published DFlash drafts have the same form. Pickle files are never loaded, nor is code.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from convert import float8, names, tokenizer_files, weights
from convert.files import about, read_json
from convert.safetensors_headers import Header, read_headers
from convert.shards import DTYPES, FLOATS, INDEX, SINGLE
from convert.speculators import D2T, T2D, check_whole, has_whole_vocabulary, read_vocabulary
from dflash_jax.config import DraftConfig, TargetConfig, token_ids
from dflash_jax.errors import UserError, check

GENERATION = "generation_config.json"
# Of a weight, as it may be stored; float64 is read and not written.
STORED = {"F64": np.dtype(np.float64), **{name: kind for kind, name in DTYPES.items() if kind in FLOATS}}
UNQUANTISED = np.dtype(ml_dtypes.bfloat16)  # what a weight in float8 becomes
VOCABULARY = {D2T: "I64", T2D: "BOOL"}
LEGACY_BUFFER = "rotary_emb.inv_freq"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
        # What is read is no longer quantised.
        self._quantised = self.hf_config.pop("quantization_config", None)

    @functools.cached_property
    def _scaled_by(self) -> tuple[int, int] | None:
        with about(self.config_name):
            return float8.block_size(self._quantised)

    @functools.cached_property
    def headers(self) -> dict[str, Header]:
        """Every tensor's header, by name; buffers that old files keep of what the config says are left out."""
        headers = read_headers(self.path).items()
        return {name: header for name, header in headers if not name.endswith(LEGACY_BUFFER)}

    @property
    def _maps_all(self) -> bool:
        return has_whole_vocabulary(self.hf_config)

    def holds(self, path: str) -> bool:
        """Say whether a draft's parameter outside its layers is there."""
        return names.spelled(path, "draft") in self.headers

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse tensors that are not those of the config, or of a dtype that is not supported."""
        headers = self.headers
        with about(self.path):
            shapes = {name: header.shape for name, header in headers.items()}
            wanted = self._wanted(config) | self._scales()
            if D2T in wanted or (self._maps_all and (D2T in headers or T2D in headers)):
                wanted.setdefault(D2T, names.Tensor(D2T, (config.vocab_size,), transposed=False))
                wanted[T2D] = names.Tensor(T2D, (config.vocab_size,), transposed=False)
            pruned = [name for name in (D2T, T2D) if name in headers and name not in wanted]
            check(
                not pruned,
                f"{', '.join(pruned)}: of a pruned vocabulary, and {self.config_name} tells of none; a config in the "
                "layout of speculators, with its draft_vocab_size, is right",
            )
            if self._stores_tied_head(config):
                shapes.pop(HEAD)
            names.check_shapes(shapes, wanted)
            odd = [f"{name} ({header.dtype})" for name, header in headers.items() if not self._reads(name)]
            check(not odd, f"tensors of a dtype that is not supported: {names.few(odd)}; {', '.join(STORED)} are")

    def stored_names(self, config: TargetConfig | DraftConfig) -> dict[str, set[str]]:
        """Return the names of the dtypes in which each parameter is stored."""
        known = STORED | {float8.STORED: float8.DTYPE, VOCABULARY[D2T]: np.dtype(np.int64)}
        found: dict[str, set[str]] = collections.defaultdict(set)
        for name, tensor in self._wanted(config).items():
            found[tensor.path].add(known[self.headers[name].dtype].name)
        return found

    def stored_dtypes(self, config: TargetConfig | DraftConfig) -> dict[str, np.dtype]:
        """Return each parameter's dtype; one that consists of several tensors has what holds them all."""
        dtypes: dict[str, np.dtype] = {}
        for name, tensor in self._wanted(config).items():
            dtype = np.dtype(np.int32) if name == D2T else STORED.get(self.headers[name].dtype, UNQUANTISED)
            dtypes[tensor.path] = jnp.promote_types(dtypes.get(tensor.path, dtype), dtype)
        return dtypes

    def arrays(self, config: TargetConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> weights.Arrays:
        """Yield every parameter, one at a time.

        Raises:
            UserError: a file that cannot be read, or a stored head that is not the embedding it is tied to.
        """
        if self._stores_tied_head(config):
            self._check_tied_head()
        if self._maps_all and D2T in self.headers:
            with about(self.path):
                check_whole(*self._maps())
        for path, group in itertools.groupby(self._wanted(config).items(), lambda item: item[1].path):
            parts = dict(group)
            if D2T in parts:
                yield path, self._vocabulary()
                continue
            yield path, weights.assemble([(tensor, self._values(name)) for name, tensor in parts.items()], dtypes[path])

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
        beside = [self.path / name for name in ("config.json", INDEX) if (self.path / name).is_file()]
        return sorted(weight_files | {*beside, *self.companions()})

    def save_companions(self, directory: Path) -> None:
        """Copy the tokenizer's files and the generation config into a directory."""
        for file in self.companions():
            if file.suffix == ".json":
                read_json(file)  # what cannot be used is not carried over
            with about(file):
                content = file.read_bytes()
            (directory / file.name).write_bytes(content)

    def companions(self) -> list[Path]:
        """Return the tokenizer's files and the generation config."""
        beside = [self.path / name for name in (*tokenizer_files.NAMES, GENERATION)]
        return [file for file in beside if file.is_file()]

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

    def _values(self, name: str) -> Iterator[np.ndarray]:
        if self._scaled_by is None or not float8.is_matrix(self.headers[name]):
            return self._blocks(name)
        scale = np.concatenate(list(self._blocks(name + float8.SCALE)))
        return float8.dequantised(float8.blocks(self.headers[name]), scale, self._scaled_by)

    def _scales(self) -> dict[str, names.Tensor]:
        """Return the scales that a checkpoint in float8 has."""
        if self._scaled_by is None:
            return {}
        quantised = [name for name, header in self.headers.items() if float8.is_matrix(header)]
        shapes = {name: float8.scale_shape(self.headers[name].shape, self._scaled_by) for name in quantised}
        return {name + float8.SCALE: names.Tensor("", shape, transposed=False) for name, shape in shapes.items()}

    def _reads(self, name: str) -> bool:
        """Say whether a tensor is of a dtype that is supported."""
        header = self.headers[name]
        if name in VOCABULARY:
            return header.dtype == VOCABULARY[name]
        return header.dtype in STORED or (self._scaled_by is not None and float8.is_matrix(header))

    def _vocabulary(self) -> np.ndarray:
        with about(self.path):
            return read_vocabulary(*self._maps())

    def _maps(self) -> tuple[np.ndarray, np.ndarray]:
        d2t, t2d = (np.concatenate(list(self._blocks(name))) for name in (D2T, T2D))
        return d2t, t2d

    def _stores_tied_head(self, config: TargetConfig | DraftConfig) -> bool:
        tied = isinstance(config, TargetConfig) and config.tie_word_embeddings
        return tied and HEAD in self.headers and EMBEDDING in self.headers

    def _check_tied_head(self) -> None:
        head, embedding = self.headers[HEAD], self.headers[EMBEDDING]
        same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
            np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
            for ours, theirs in zip(self._values(HEAD), self._values(EMBEDDING), strict=True)
        )
        check(
            same,
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but {self.config_name} ties them; tie_word_embeddings "
            "false, or no head of its own, is right",
        )
