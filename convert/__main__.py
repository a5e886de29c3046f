"""`python -m convert`: checkpoints from one format to another, and what they are."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from convert import progress
from convert.cli import Parser, run
from convert.conversion import read_size
from convert.inspection import inspect
from convert.to_flax import to_flax
from convert.to_hf import to_hf
from dflash_jax.errors import check

SOURCE = "Flax checkpoint, Hugging Face directory, .gguf file or hub id (owner/name)"
EXAMPLE = """example:
  python -m convert to-flax Qwen/Qwen3-4B qwen3-4b --dtype bfloat16
  python -m convert to-hf my-draft-flax my-draft
  python -m convert inspect qwen3-4b --json"""


def main(arguments: Sequence[str]) -> None:
    """Parse a command line and do what it says."""
    options = _parser().parse_args(arguments)
    # Converting needs no accelerator, and a model may well not fit on one.
    jax.config.update("jax_platforms", "cpu")
    if options.command == "inspect":
        _print(inspect(options.path, options.target), as_json=options.json)
        return
    check(bool(options.destination), "DST: empty; a directory that is not there yet is right")
    write = to_flax
    if options.command == "to-hf":
        write = functools.partial(to_hf, max_shard_bytes=read_size(options.max_shard_size))
    made = write(options.source, Path(options.destination), options.dtype, verify=options.verify, watch=progress.show)
    print(f"{options.destination}: {made['kind']}, {made['parameters']:,} parameters, {made['dtype']}")


def _parser() -> Parser:
    parser = Parser(prog="python -m convert", description=__doc__, epilog=EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("to-flax", "write a Flax checkpoint"),
        ("to-hf", "write a Hugging Face directory: a target, or a draft in the layout that vLLM and SGLang load"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        command.add_argument("source", metavar="SRC", help=SOURCE)
        command.add_argument("destination", metavar="DST", help="directory to write, which must not be there yet")
        command.add_argument(
            "--dtype", default="keep", metavar="keep|float32|bfloat16", help="of the parameters written (default: keep)"
        )
        command.add_argument(
            "--verify", action="store_true", help="compare what was written with the source, bit by bit"
        )
        if name == "to-hf":
            command.add_argument(
                "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)"
            )
    text = "say what a checkpoint is, from its headers"
    command = commands.add_parser("inspect", help=text, description=text, epilog=parser.epilog)
    command.add_argument("path", metavar="PATH", help=SOURCE)
    command.add_argument("--target", metavar="T", help="say of a draft whether it is for this target")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _print(description: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(description))
        return
    layers = description.pop("layers")
    width = max(map(len, description))
    for name, value in description.items():
        print(f"{name:<{width}}  {value if name.endswith('_id') else _text(value)}")
    print()
    _print_table(layers)


def _print_table(rows: list[dict[str, Any]]) -> None:
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def command() -> NoReturn:
    """Run as a command, with the arguments of the process."""
    run(main)


if __name__ == "__main__":
    command()
