"""Train a draft for a target: `python -m training.run --help`."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from convert import cli, compile_cache, processes
from dflash_jax.errors import check
from training import flags, machines, plan
from training.config import RunConfig
from training.presets import PRESETS
from training.trainer import train

EXAMPLE = """\
example:
  python -m training.run qwen3-4b --data prepared --output runs/qwen3-4b --train.batch-size 16

  python -m training.run qwen3-8b --plan v5p-64

--data is what `python -m training.prepare` wrote. Run again with the same output, it goes on from the newest
checkpoint. The draft is in the output's draft/ in the end. SIGTERM and Ctrl-C save, then exit.
`python -m training.run qwen3-4b --help` shows the settings of that preset, in brackets.
"""


def main(argv: Sequence[str]) -> None:
    """Train as the arguments say.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    preset = next((PRESETS[word] for word in argv if word in PRESETS), None)
    args = _parser(preset).parse_args(argv)
    check(args.output != "", "--output: empty; a directory, or leaving out --output, is right")
    config = _config(args)
    if args.plan is not None:
        _plan(config, args)
        return
    check(not args.json, "--json: only with --plan MACHINE")
    check(args.data is not None, "--data: not given; a directory that `python -m training.prepare` wrote is right")
    processes.join()
    compile_cache.keep()
    train(config, Path(args.data), Path(args.output or f"runs/{config.preset}"))


def _parser(preset: RunConfig | None) -> cli.Parser:
    parser = cli.Parser(
        prog="python -m training.run",
        usage="%(prog)s PRESET --data DIR [--output DIR] [--section.field value …]",
        description="Train a DFlash draft for a target, from rows that training.prepare wrote.",
        epilog=EXAMPLE,
    )
    parser.add_argument("preset", metavar="PRESET", help=f"where settings start from: {', '.join(PRESETS)}")
    parser.add_argument("--data", metavar="DIR", help="prepared rows")
    parser.add_argument("--output", metavar="DIR", help="what the run writes, and resumes from (default: runs/PRESET)")
    parser.add_argument(
        "--plan",
        metavar="MACHINE",
        help="compile the step for v5e-16, v5p-64, v6e-8, h100-8, …, without having it, and say what it takes, on the "
        "mesh that is given or on some that may suit the machine",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    flags.add_flags(parser, preset)
    return parser


def _plan(config: RunConfig, args: argparse.Namespace) -> None:
    chips = machines.find(args.plan).chips
    given = any(f"mesh.{axis}" in vars(args) for axis in ("data", "fsdp", "tensor"))
    plans = plan.make(config, config.mesh.on(chips) if given else None, args.plan)
    print(json.dumps(plans[0].to_dict()) if args.json else plan.text(plans))


def _config(args: argparse.Namespace) -> RunConfig:
    near = difflib.get_close_matches(args.preset, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(PRESETS)} is right"
    check(args.preset in PRESETS, f"preset {args.preset!r} is not known; {hint}")
    return flags.override(PRESETS[args.preset], args)


def command() -> NoReturn:
    """Run as a command, with the arguments of the process."""
    cli.run(main)


if __name__ == "__main__":
    command()
