"""Flags that the commands of decoding share, what they name, and the faults that are told by their names."""

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from convert import LoadedDraft, LoadedTarget, load_draft, load_target, progress
from convert.demo_target import find_demo_target
from dflash_jax import sharding
from dflash_jax.config import TargetConfig
from dflash_jax.errors import UserError, check
from inference.demo import DEMO_DRAFT

# How the engine calls what the user gave as a flag.
FLAGS = {
    "max_new_tokens": "--max-new-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "seed": "--seed",
    "stop_token_ids": "--stop",
    "block_size": "--block-size",
    "batch_size": "--batch-size",
    "max_length": "--max-length",
    "mesh": "--mesh",
}
DTYPES = ("float32", "bfloat16")
AUTO: Literal["auto"] = "auto"
TOO_MUCH = (
    "--max-length, --batch-size: they ask for more memory than there is; less of either, or --dtype bfloat16, is right"
)
# Not where they are a part of some path.
FIELDS = re.compile(rf"(?<![\w/.-])({'|'.join(FLAGS)})(?![\w/.-])")


@contextlib.contextmanager
def flags_named(where: str = "") -> Iterator[None]:
    """Let the engine's complaints name flags as the user typed them; `where` is left as it is.

    Raises:
        UserError: the same fault, renamed.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
        place = where if message.startswith(where) else ""
        raise UserError(place + FIELDS.sub(lambda name: FLAGS[name[0]], message.removeprefix(place))) from error


def block_size(text: str) -> int | Literal["auto"]:
    """Read a size of blocks.

    Raises:
        ArgumentTypeError: neither a size nor `auto`.
    """
    if text == AUTO:
        return AUTO
    try:
        return whole(2)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number of 2 or more, or auto, is right") from error


def add_model_flags(models: argparse._ArgumentGroup, draft: str) -> None:
    """Add the flags that say what is loaded and where it lies; `draft` is what --help says of the draft."""
    models.add_argument("--ckpt", metavar="T", help="the target; may be a .gguf file, too (default: the demo's)")
    models.add_argument("--draft", metavar="D", help=draft)
    models.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (default: %(default)s)")
    models.add_argument(
        "--max-length",
        type=whole(2),
        default=2048,
        metavar="N",
        help="most tokens of a prompt and its answer (default: 2048)",
    )
    models.add_argument(
        "--mesh",
        type=_mesh_sizes,
        default={},
        metavar="data=1,tensor=1",
        help="devices to spread rows (data) and heads (tensor) over, of one process or of several",
    )


def add_thinking_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that lets models think."""
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let a model think first that can (default: no)",
    )


def add_sampling_flags(answers: argparse._ArgumentGroup, *, several: bool = False) -> None:
    """Add the flags that say how tokens are chosen, for every command that has answers given.

    With `several`, the temperature is a list of them.
    """
    temperatures: dict[str, Any] = {"nargs": "+", "default": [0.0]} if several else {"default": 0.0}
    answers.add_argument("--temperature", type=float, metavar="X", help="0, the default, is greedy", **temperatures)
    answers.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to P in all"
    )
    answers.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    answers.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default: 0)")


def whole(least: int) -> Callable[[str], int]:
    """Return what reads a flag's whole number of `least` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; a whole number of {least} or more is right")
        return value

    return number


def _mesh_sizes(text: str) -> dict[str, int]:
    try:
        return sharding.read_mesh(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def checkpoints(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the target and the draft that the flags name, or those of the demo.

    Raises:
        UserError: an empty name, a block size without a draft, or the demo's target is not installed.
    """
    for flag, name in (("--ckpt", args.ckpt), ("--draft", args.draft)):
        check(name != "", f"{flag}: empty; a checkpoint, or leaving out {flag}, is right")
    if args.ckpt is None:
        return str(find_demo_target()), args.draft or str(DEMO_DRAFT)
    check(
        args.block_size is None or args.draft is not None,
        "--block-size: it needs --draft; without one a block is one token",
    )
    return args.ckpt, args.draft


def load_models(
    args: argparse.Namespace, ckpt: str, draft: str | None, mesh: Mesh
) -> tuple[LoadedTarget, LoadedDraft | None]:
    """Load the target, and the draft where there is one, in the dtype that the flags name, onto the mesh.

    Raises:
        UserError: a checkpoint that cannot be read, or that the mesh does not divide.
    """

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        with flags_named():
            return sharding.place(mesh, path, array)

    target = load_target(ckpt, args.dtype, place=place, watch=progress.show)
    return target, load_draft(draft, args.dtype, place=place, watch=progress.show) if draft else None


def check_memory(args: argparse.Namespace, target: TargetConfig, mesh: Mesh) -> None:
    """Refuse, before asking the system for it, room for more tokens than memory can hold.

    Raises:
        UserError: the target's cache alone is larger than the memory.
    """
    tokens = args.batch_size * min(args.max_length, target.max_positions)
    bytes_a_token = 2 * target.num_layers * target.num_kv_heads * target.head_dim * jnp.dtype(args.dtype).itemsize
    needed, there = tokens * bytes_a_token, _memory(mesh)
    check(
        needed <= there,
        f"--max-length, --batch-size: caches for {tokens} tokens take {needed / 2**30:.1f} GiB, and the memory is "
        f"{there / 2**30:.1f} GiB; less of either is right",
    )


def _memory(mesh: Mesh) -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) * mesh.size
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()
