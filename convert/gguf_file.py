"""GGUF files of Llama and Qwen3 targets: their metadata as a config, their tensors dequantised."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from convert import gguf_config, gguf_tokenizer, names, weights
from convert.files import about, about_values
from convert.gguf_header import StoredTensor, read_header
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import check

# These stay as they are stored; quantised types become float32.
KEPT = {
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
TEMPLATE = "tokenizer.chat_template"


class GgufSource:
    """One .gguf file. Its header is read at once, its data when `arrays` is called."""

    format = "GGUF file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_name = str(path)
        header = read_header(path)
        self.metadata, self.tensors = header.metadata, header.tensors
        with about_values(path):
            self.hf_config = gguf_config.read(self.metadata, self.tensors, self._rope_factors())

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse tensors that are not those of the metadata, or of a type that cannot be dequantised."""
        with about(self.path):
            found = {name: tensor.shape for name, tensor in self.tensors.items() if name != gguf_config.ROPE_FACTORS}
            names.check_shapes(found, names.expected(config, "gguf"))
            odd = [f"{name} ({tensor.type.name})" for name, tensor in self.tensors.items() if not _known(tensor.type)]
            check(not odd, f"tensors of a type that the gguf package does not dequantise: {', '.join(odd)}")

    def stored_names(self, config: TargetConfig | DraftConfig) -> dict[str, set[str]]:
        """Return the name of the type in which each parameter is stored."""
        return {tensor.path: {self.tensors[name].type.name} for name, tensor in names.expected(config, "gguf").items()}

    def stored_dtypes(self, config: TargetConfig | DraftConfig) -> dict[str, np.dtype]:
        """Return the dtype that each parameter has once it is dequantised."""
        wanted = names.expected(config, "gguf").items()
        return {tensor.path: KEPT.get(self.tensors[name].type, np.dtype(np.float32)) for name, tensor in wanted}

    def arrays(self, config: TargetConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> weights.Arrays:
        """Yield every parameter, one at a time, dequantised."""
        for name, tensor in names.expected(config, "gguf").items():
            blocks = self._blocks(self.tensors[name], self._row_order(name, config))
            yield tensor.path, weights.assemble([(tensor, blocks)], dtypes[tensor.path])

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return no more stops than the config has: there is no other place for them."""
        return ()

    def tokenizer(self) -> Any:
        """Build the tokenizer that the metadata describes."""
        with about_values(self.path):
            return gguf_tokenizer.build(self.metadata)

    def has_chat_template(self) -> bool:
        """Say whether the metadata holds a chat template."""
        return TEMPLATE in self.metadata

    def files(self) -> list[Path]:
        """Return the one file."""
        return [self.path]

    def companions(self) -> list[Path]:
        """Return no files: what lies beside the weights elsewhere is in this one."""
        return []

    def save_companions(self, directory: Path) -> None:
        """Write the tokenizer as files into a directory, unless the file has none."""
        if gguf_tokenizer.MODEL in self.metadata:
            self.tokenizer().save_pretrained(directory)

    def _rope_factors(self) -> np.ndarray | None:
        tensor = self.tensors.get(gguf_config.ROPE_FACTORS)
        if tensor is None:
            return None
        kind = tensor.type
        check(
            kind == GGMLQuantizationType.F32, f"tensor {gguf_config.ROPE_FACTORS}: {kind.name} is not supported; F32 is"
        )
        return np.concatenate(list(self._blocks(tensor, None)))

    def _row_order(self, name: str, config: TargetConfig | DraftConfig) -> np.ndarray | None:
        """Return where each row lies: llama.cpp stores the halves of a Llama's query and key heads interleaved."""
        if self.metadata[gguf_config.ARCHITECTURE] != "llama" or (".attn_q." not in name and ".attn_k." not in name):
            return None
        heads = config.num_heads if ".attn_q." in name else config.num_kv_heads
        lies = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
        return lies.swapaxes(1, 2).reshape(-1)

    def _blocks(self, tensor: StoredTensor, order: np.ndarray | None) -> Iterator[np.ndarray]:
        # Read, not mapped: mapped pages would stay beside the dequantised values.
        with about(self.path):
            raw = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.start)
        rows = _rows(raw, tensor)
        for block in weights.row_blocks(tensor.shape):
            yield dequantize(rows[block] if order is None else rows[order[block]], tensor.type)


def _rows(raw: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    if tensor.type == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    if tensor.type == GGMLQuantizationType.F16:
        return raw.view(np.float16).reshape(tensor.shape)
    return raw.reshape(*tensor.shape[:-1], tensor.row_bytes)


@functools.cache
def _known(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
