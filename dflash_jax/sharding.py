"""The mesh, and what lies where on it: the only place that names its axes.

`data` splits rows of a batch, `fsdp` parameters that are gathered where they are used, and in training rows too, and
`tensor` heads, MLP widths and the vocabulary. All three are always there; most have size 1.

Training traces its programs under the mesh (`traced_on`), and there the models say how what they compute lies.
"""

import collections
import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import TransformerConfig
from dflash_jax.errors import UserError, check

AXES = ("data", "fsdp", "tensor")
# What a parameter's axes are split over, by its path. A path has one rule.
RULES = {
    r"embedding": PartitionSpec("tensor", "fsdp"),
    r"(scored/)?head": PartitionSpec("fsdp", "tensor"),
    r"scored/rows|vocabulary": PartitionSpec(),
    r"fc/kernel": PartitionSpec("fsdp", "tensor"),
    r"layers_\d+/(attention/[qkv]_proj|mlp/(gate|up)_proj)/kernel": PartitionSpec("fsdp", "tensor"),
    r"layers_\d+/(attention/[qkv]_proj|mlp/(gate|up)_proj)/bias": PartitionSpec("tensor"),
    r"layers_\d+/(attention/o_proj|mlp/down_proj)/kernel": PartitionSpec("tensor", "fsdp"),
    r"layers_\d+/(attention/o_proj|mlp/down_proj)/bias": PartitionSpec(),
    r"layers_\d+/experts/router/kernel": PartitionSpec("fsdp", None),
    r"layers_\d+/experts/(gate|up)_proj": PartitionSpec(None, "fsdp", "tensor"),
    r"layers_\d+/experts/down_proj": PartitionSpec(None, "tensor", "fsdp"),
    r"(layers_\d+/)?(attention/)?\w+_norm/scale": PartitionSpec(),
}
WHOLE = PartitionSpec()
ROWS = PartitionSpec("data")
CACHE = PartitionSpec("data", "tensor")  # [b, k, s, h]
TRAINED_ROWS = PartitionSpec(("data", "fsdp"))
TRAINED_HEADS = PartitionSpec(("data", "fsdp"), "tensor")  # [b, n, q, h]
EVERY_DEVICE = PartitionSpec(AXES)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over the first data * fsdp * tensor devices, of all processes unless they are given.

    Raises:
        UserError: a size below 1, fewer devices than it takes, a process that none of them belongs to, or slices that
            data and fsdp cannot be split over.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        check(size >= 1, f"mesh: {name}={size}; 1 or more is right")
    there = jax.devices() if devices is None else devices
    needed = data * fsdp * tensor
    check(
        needed <= len(there),
        f"mesh: {', '.join(f'{name}={size}' for name, size in sizes.items())} takes {needed} devices; "
        f"{len(there)} are there; sizes that make as many, or leaving them out, is right",
    )
    idle = {device.process_index for device in there} - {device.process_index for device in there[:needed]}
    check(
        not idle,
        f"mesh: {needed} of {len(there)} devices leave process {min(idle, default=0)} without one; "
        f"sizes that make {len(there)} are right",
    )
    laid_out = _laid_out(data, fsdp, tensor, there[:needed])
    return Mesh(laid_out, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _laid_out(data: int, fsdp: int, tensor: int, devices: Sequence[Any]) -> np.ndarray:
    """Lay devices out, neighbours of a TPU slice's torus side by side.

    Several slices, which nodes of GPUs are to jax as well, are told apart by data first and then by fsdp.
    """
    sizes = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    slices = len(sizes)
    by_data = math.gcd(data, slices)
    by_fsdp = slices // by_data
    check(
        len(set(sizes.values())) == 1,
        f"mesh: {len(devices)} devices are {', '.join(map(str, sizes.values()))} of {slices} slices of TPUs, or nodes "
        "of GPUs; sizes that take as many of each are right",
    )
    check(
        fsdp % by_fsdp == 0,
        f"mesh: data={data}, fsdp={fsdp} over {slices} slices of TPUs, or nodes of GPUs; a multiple of {slices} for "
        "data, or for both together, is right",
    )
    within, split = (data // by_data, fsdp // by_fsdp, tensor), {"allow_split_physical_axes": True}
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(within, devices, **split)
        return mesh_utils.create_hybrid_device_mesh(within, (by_data, by_fsdp, 1), devices, **split)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"mesh: data={data}, fsdp={fsdp}, tensor={tensor} cannot be laid out on these {len(devices)} devices "
            f"({error}); sizes that make as many as there are are right"
        ) from error


def check_mesh(mesh: Mesh | AbstractMesh, config: TransformerConfig) -> None:
    """Refuse a mesh that would split a head, or widths unevenly.

    Raises:
        UserError: naming the axis and the size that it does not divide.
    """
    parts, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    widths = {layer.experts.intermediate_size for layer in config.layers if layer.experts}
    for what, size in (
        *(("columns of an expert", width) for width in widths),
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
    """Return what a parameter's axes are split over. A stack's are those of its layers, after the axis of layers.

    Raises:
        ValueError: no rule is for this path, or more than one is.
    """
    if path.startswith("stack_"):
        return PartitionSpec(None, *parameter_spec(f"layers_0/{path.partition('/')[2]}"))
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


def place(mesh: Mesh, path: tuple[str, ...], array: Any) -> jax.Array:
    """Put a tensor where its rule says, as it is read: no device, and no process, holds what is not its own."""
    return put(mesh, parameter_spec("/".join(path)), array)


def put_params(mesh: Mesh, params: dict[str, Any]) -> dict[str, Any]:
    """Place a tree of parameters by their rules; what lies right already is not moved."""
    return jax.tree.map(
        lambda leaf, sharding: leaf if _lies(leaf, sharding) else put(mesh, sharding.spec, leaf),
        params,
        shardings(mesh, params),
    )


def shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """Return how every leaf lies of parameters, or of what an optimizer keeps of each; its counts are everywhere."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:  # noqa: ARG001
        names: list[str] = []
        for key in path:
            names = [*names, str(key.key)] if isinstance(key, jax.tree_util.DictKey) else []
        return NamedSharding(mesh, parameter_spec("/".join(names)) if names else WHOLE)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain(mesh: Mesh | AbstractMesh, spec: PartitionSpec, tree: Any) -> Any:
    """Say inside a program how every leaf of a tree lies."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))


def row_groups(mesh: Mesh | AbstractMesh) -> int:
    """Return into how many parts training splits the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in TRAINED_ROWS[0])


def traced_on(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Let the functions below know the mesh, for as long as a program is traced; without it they change nothing."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def by_rows(tree: Any) -> Any:
    """Say that every leaf of a tree is split by rows of the batch, where they divide over the mesh."""
    return jax.tree.map(lambda leaf: _constrain_here(_rows(leaf), leaf), tree)


def gathered(path: str, weight: Any) -> Any:
    """Say that a parameter is gathered over `fsdp` here, once for all its uses."""
    return _constrain_here(PartitionSpec(*(None if axis == "fsdp" else axis for axis in parameter_spec(path))), weight)


def looked_up(table: Any, tokens: Any) -> Any:
    """Look up rows of an embedding that lies by its rule: its columns stay where they are, and what is found moves."""
    if not _rows(tokens):
        return table[tokens]
    found = table[_constrain_here(ROWS, tokens)]
    return by_rows(_constrain_here(PartitionSpec("data", None, "fsdp"), found))


def on_own_shards(function: Callable[..., Any], inputs: Any, output: PartitionSpec) -> Callable[..., Any]:
    """Have each device run a function on its own part of the inputs, by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=output, check_vma=False)


def on_expert_shards(mix: Callable[..., Any]) -> Callable[..., Any]:
    """Have each device run `mix` of `experts` on its own rows and its own columns of all experts, and add those up.

    Told here since the compiler does not split products of groups by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return mix
    columns, lines = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor", None)

    def run(x: Any, *others: Any) -> Any:
        rows = _rows(x)
        mapped = jax.shard_map(
            lambda *inputs: jax.lax.psum(mix(*inputs), "tensor"),
            mesh=mesh,
            in_specs=(rows,) * 3 + (columns, columns, lines),
            out_specs=rows,
            check_vma=False,
        )
        return mapped(x, *others)

    return run


def _rows(leaf: Any) -> PartitionSpec:
    """Return how a leaf's rows are split: over none, where they do not divide, as the one row of a prompt."""
    return WHOLE if leaf.shape[0] % row_groups(jax.sharding.get_abstract_mesh()) else TRAINED_ROWS


def _constrain_here(spec: PartitionSpec, tree: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.size <= 1 else constrain(mesh, spec, tree)


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
