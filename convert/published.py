"""Directories in the published layout, as transformers, vLLM, SGLang and the published reference load them."""

import functools
import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import names, weights
from convert.files import check_room, new_directory, write_json
from convert.huggingface import SINGLE, STORED
from convert.trees import flatten
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import check
from dflash_jax.parameters import Params

# Serving engines take no other; from the widest to the narrowest, so that every tensor of a file starts aligned.
WRITTEN = {STORED[name]: name for name in ("F32", "BF16", "F16")}
METADATA = {"format": "pt"}  # transformers asks for it


def publish(destination: Path, config: DraftConfig | TargetConfig, params: Params, dtype: str | None) -> None:
    """Write a directory, which appears whole or not at all; arguments as for `write_published`.

    Raises:
        UserError: as for `write_published`, a destination that is there already, or no room for it.
    """
    with new_directory(destination) as directory:
        write_published(directory, config, params, dtype)


def write_published(directory: Path, config: DraftConfig | TargetConfig, params: Params, dtype: str | None) -> None:
    """Fill an empty directory with config.json and model.safetensors.

    Memory holds one tensor more than the parameters: each is turned, cast and written by itself.

    Args:
        directory: where to write.
        config: of the model.
        params: its parameters, every one of them whole in this process.
        dtype: "float32" or "bfloat16"; None keeps that of each tensor.

    Raises:
        UserError: parameters that are not those of the config, or of a dtype that is not published.
        OSError: no room, or whatever else the file system objects to.
    """
    asked = weights.asked_dtype(dtype)
    leaves = flatten(params)
    names.check_shapes({path: leaf.shape for path, leaf in leaves.items()}, names.expected(config, "flax"))
    kinds = {path: asked or np.dtype(leaf.dtype) for path, leaf in leaves.items()}
    odd = [f"{path} ({kind.name})" for path, kind in kinds.items() if kind not in WRITTEN]
    check(not odd, f"dtypes that are not published: {', '.join(odd)}; --dtype float32 or bfloat16 is right")
    write_json(directory / "config.json", _spell(config, set(kinds.values())))
    _write_tensors(directory / SINGLE, names.expected(config, names.published_layout(config)), leaves, kinds)


def _spell(config: DraftConfig | TargetConfig, kinds: set[np.dtype]) -> dict[str, Any]:
    """Spell a config for readers old and new."""
    written = config.to_hf()
    rotary = written["rope_parameters"]
    scaled = rotary.get("rope_type", "default") != "default"
    # The dtype that readers cast every tensor to: where there are several, one that holds them all.
    dtype = functools.reduce(jnp.promote_types, kinds).name
    written |= {
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_scaling": {key: value for key, value in rotary.items() if key != "rope_theta"} if scaled else None,
    }
    if isinstance(config, DraftConfig) and config.is_causal is not None:
        written["dflash_config"] |= {"causal": config.is_causal}  # where older vLLMs look for it
    return written


def _write_tensors(
    file: Path, tensors: dict[str, names.Tensor], leaves: dict[str, jax.Array | np.ndarray], kinds: dict[str, np.dtype]
) -> None:
    """Write a safetensors file; the library's own writer wants a second copy of everything, turned and cast."""
    rank = list(WRITTEN).index
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    order = sorted(tensors, key=lambda name: (rank(kinds[tensors[name].path]), name))
    for name in order:
        tensor = tensors[name]
        kind = kinds[tensor.path]
        start, end = end, end + leaves[tensor.path].size * kind.itemsize
        header[name] = {"dtype": WRITTEN[kind], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    check_room(file.parent, end)
    with file.open("xb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            tensor = tensors[name]
            array = np.asarray(leaves[tensor.path])
            array = np.asarray(array.T if tensor.transposed else array, kinds[tensor.path], order="C")
            opened.write(array.reshape(-1).view(np.uint8).data)
