"""The mesh, and what lies where on it: the only place that names its axes.

`data` splits rows of a batch, `fsdp` parameters that are gathered where they are used, and `tensor` heads,
MLP widths and the vocabulary. All three are always there; most have size 1.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import TransformerConfig
from dflash_jax.errors import check

AXES = ("data", "fsdp", "tensor")
# What a parameter's axes are split over, by its path. A path has one rule.
RULES = {
    r"embedding": PartitionSpec("tensor", "fsdp"),
    r"head": PartitionSpec("fsdp", "tensor"),
    r"fc/kernel": PartitionSpec("fsdp", "tensor"),
    r"layers_\d+/(attention/[qkv]_proj|mlp/(gate|up)_proj)/kernel": PartitionSpec("fsdp", "tensor"),
    r"layers_\d+/(attention/[qkv]_proj|mlp/(gate|up)_proj)/bias": PartitionSpec("tensor"),
    r"layers_\d+/(attention/o_proj|mlp/down_proj)/kernel": PartitionSpec("tensor", "fsdp"),
    r"layers_\d+/(attention/o_proj|mlp/down_proj)/bias": PartitionSpec(),
    r"(layers_\d+/)?(attention/)?\w+_norm/scale": PartitionSpec(),
}
WHOLE = PartitionSpec()
ROWS = PartitionSpec("data")
CACHE = PartitionSpec("data", "tensor")  # [b, k, s, h]


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over the first data * fsdp * tensor devices, of all processes unless they are given.

    Raises:
        UserError: a size below 1, fewer devices than it takes, or a process that none of them belongs to.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        check(size >= 1, f"mesh: {name}={size}; 1 or more is right")
    there = jax.devices() if devices is None else devices
    needed = data * fsdp * tensor
    check(
        needed <= len(there),
        f"mesh: {', '.join(f'{name}={size}' for name, size in sizes.items())} takes {needed} devices; "
        f"{len(there)} are there",
    )
    idle = {device.process_index for device in there} - {device.process_index for device in there[:needed]}
    check(
        not idle,
        f"mesh: {needed} of {len(there)} devices leave process {min(idle, default=0)} without one; "
        f"sizes that make {len(there)} are right",
    )
    grid = np.asarray(there[:needed], dtype=object).reshape(data, fsdp, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(mesh: Mesh | AbstractMesh, config: TransformerConfig) -> None:
    """Refuse a mesh that would split a head, or widths unevenly.

    Raises:
        UserError: naming the axis and the size that it does not divide.
    """
    parts, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for what, size in (
        ("key-value heads", config.num_kv_heads),
        ("query heads", config.num_heads),
        ("MLP columns", config.intermediate_size),
        ("vocabulary rows", config.vocab_size),
        ("hidden columns", config.hidden_size),
    ):
        check(size % parts == 0, f"mesh: tensor={parts} does not divide {size} {what}; a number that does is right")
    size = config.hidden_size
    check(size % fsdp == 0, f"mesh: fsdp={fsdp} does not divide {size} hidden columns; a number that does is right")


def parameter_spec(path: str) -> PartitionSpec:
    """Return what a parameter's axes are split over.

    Raises:
        ValueError: no rule is for this path, or more than one is.
    """
    found = [spec for pattern, spec in RULES.items() if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise ValueError(f"{path}: {len(found)} sharding rules; one is right")
    return found[0]


def put(mesh: Mesh, spec: PartitionSpec, value: Any) -> jax.Array:
    """Place an array that every process has whole; each keeps what its devices hold.

    Raises:
        UserError: an axis of the mesh that does not divide the array's.
    """
    for axis, size in zip(spec, np.shape(value), strict=False):
        parts = mesh.shape[axis] if axis else 1
        check(size % parts == 0, f"mesh: {axis}={parts} does not divide an axis of {size}; a number that does is right")
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_params(mesh: Mesh, params: dict[str, Any]) -> dict[str, Any]:
    """Place a tree of parameters by their rules; what lies right already is not moved."""

    def place(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        spec = parameter_spec("/".join(str(key.key) for key in path))
        return leaf if _lies(leaf, NamedSharding(mesh, spec)) else put(mesh, spec, leaf)

    return jax.tree_util.tree_map_with_path(place, params)


def constrain(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """Say inside a program how every leaf of a tree lies."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))


def _lies(leaf: Any, sharding: NamedSharding) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def read_mesh(text: str) -> dict[str, int]:
    """Read `data=2,tensor=4`.

    Raises:
        UserError: anything else.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        check(
            name in AXES and name not in sizes and re.fullmatch("[1-9][0-9]{0,8}", size) is not None,
            f"{part!r} in {text!r}; sizes by axis, as in data=2,tensor=4, are right",
        )
        sizes[name] = int(size)
    return sizes
