"""Directories in the published layout, as transformers, vLLM, SGLang and the published reference load them."""

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert import names, speculators, weights
from convert.files import new_directory, write_json
from convert.shards import FLOATS, Shards, Stored
from convert.trees import flatten
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import check
from dflash_jax.parameters import Params

LARGEST_SHARD = 5 * 10**9  # bytes; transformers' own


def publish(destination: Path, config: DraftConfig | TargetConfig, params: Params, dtype: str | None) -> None:
    """Write a directory, which appears whole or not at all.

    Args:
        destination: a directory that is not there yet.
        config: of the model.
        params: its parameters, every one of them whole in this process.
        dtype: "float32" or "bfloat16"; None keeps that of each tensor.

    Raises:
        UserError: parameters that are not those of the config, or of a dtype that is not published; a destination that
            is there already, or no room for it.
    """
    leaves = flatten(params)
    names.check_shapes({path: leaf.shape for path, leaf in leaves.items()}, names.expected(config, "flax"))
    dtypes = weights.dtypes({path: leaf.dtype for path, leaf in leaves.items()}, weights.asked_dtype(dtype))
    with new_directory(destination) as directory:
        arrays = ((path, np.asarray(leaf)) for path, leaf in leaves.items())
        write_published(directory, spell(config, dtypes), config, dtypes, arrays)


def write_published(
    directory: Path,
    hf_config: dict[str, Any],
    config: DraftConfig | TargetConfig,
    dtypes: Mapping[str, np.dtype],
    arrays: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int = LARGEST_SHARD,
) -> None:
    """Fill an empty directory with config.json and safetensors, each array as it comes.

    Args:
        directory: where to write.
        hf_config: what becomes config.json.
        config: of the model, the same.
        dtypes: the dtype that each parameter is written in.
        arrays: the parameters.
        max_shard_bytes: of a file.

    Raises:
        OSError: no room, or whatever else the file system objects to.
    """
    write_json(directory / "config.json", hf_config)
    wanted = names.expected(config, names.published_layout(config))
    shards = Shards(directory, _stored(config, wanted, dtypes), max_shard_bytes)
    parts: dict[str, dict[str, names.Tensor]] = collections.defaultdict(dict)
    for name, tensor in wanted.items():
        parts[tensor.path][name] = tensor
    for path, array in arrays:
        for name, part in _parts(config, parts[path], path, array):
            shards.write(name, part)
        del array, part  # the next one is read while this loop would hold it


def _stored(
    config: DraftConfig | TargetConfig, wanted: Mapping[str, names.Tensor], dtypes: Mapping[str, np.dtype]
) -> dict[str, Stored]:
    """Return what every tensor will be in the files."""
    stored = {name: Stored(tensor.shape, dtypes[tensor.path]) for name, tensor in wanted.items()}
    if names.VOCABULARY in dtypes:
        some = speculators.write_vocabulary(np.arange(*wanted[speculators.D2T].shape), config.vocab_size)
        stored |= {name: Stored(array.shape, array.dtype) for name, array in some.items()}
    return stored


def _parts(
    config: DraftConfig | TargetConfig, tensors: Mapping[str, names.Tensor], path: str, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that a parameter is stored as."""
    if path == names.VOCABULARY:
        yield from speculators.write_vocabulary(array, config.vocab_size).items()
        return
    for name, tensor in tensors.items():
        part = array if tensor.expert is None else array[tensor.expert]
        yield name, part.T if tensor.transposed else part


def spell(
    config: DraftConfig | TargetConfig, dtypes: Mapping[str, np.dtype], *, in_speculators: bool = False
) -> dict[str, Any]:
    """Spell a config for readers old and new; a draft with parts of its own in the layout of speculators.

    Args:
        config: of the model.
        dtypes: the dtype that each parameter is written in.
        in_speculators: spell any draft in that layout.

    Raises:
        UserError: a dtype that is not published.
    """
    odd = [
        f"{path} ({dtype.name})" for path, dtype in dtypes.items() if dtype not in FLOATS and path != names.VOCABULARY
    ]
    check(not odd, f"dtypes that are not published: {names.few(odd)}; --dtype float32 or bfloat16 is right")
    # The dtype that readers cast every tensor to: where there are several, one that holds them all.
    floats = {dtype for dtype in dtypes.values() if dtype in FLOATS}
    dtype = functools.reduce(jnp.promote_types, floats).name
    if isinstance(config, DraftConfig) and (in_speculators or not config.is_bare):
        written = speculators.write_config(config)
        layers = written[speculators.LAYERS]
    else:
        written = layers = config.to_hf()
    rotary = layers["rope_parameters"]
    scaled = rotary.get("rope_type", "default") != "default"
    layers["rope_scaling"] = {key: value for key, value in rotary.items() if key != "rope_theta"} if scaled else None
    if isinstance(config, DraftConfig) and config.is_causal is not None and "dflash_config" in written:
        written["dflash_config"] |= {"causal": config.is_causal}  # where older vLLMs look for it
    return written | {"dtype": dtype, "torch_dtype": dtype}
