"""Train a draft for a target: `python -m training.run --help`."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from convert import cli, processes
from dflash_jax.errors import check
from training import flags
from training.config import RunConfig
from training.presets import PRESETS
from training.trainer import train

EXAMPLE = """\
example:
  python -m training.run qwen3-4b --data prepared --output runs/qwen3-4b --train.batch-size 16

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
    config = _config(args)
    check(args.data is not None, "--data: not given; a directory that `python -m training.prepare` wrote is right")
    processes.join()
    train(config, Path(args.data), Path(args.output or f"runs/{config.preset}"))


def _parser(preset: RunConfig | None) -> cli.Parser:
    parser = cli.Parser(
        prog="python -m training.run",
        usage="python -m training.run PRESET --data DIR [--output DIR] [--section.field value …]",
        description="Train a DFlash draft for a target, from rows that training.prepare wrote.",
        epilog=EXAMPLE,
    )
    parser.add_argument("preset", metavar="PRESET", help=f"where settings start from: {', '.join(PRESETS)}")
    parser.add_argument("--data", metavar="DIR", help="prepared rows")
    parser.add_argument("--output", metavar="DIR", help="what the run writes, and resumes from (default: runs/PRESET)")
    flags.add_flags(parser, preset)
    return parser


def _config(args: argparse.Namespace) -> RunConfig:
    near = difflib.get_close_matches(args.preset, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(PRESETS)} is right"
    check(args.preset in PRESETS, f"preset {args.preset!r} is not known; {hint}")
    return flags.override(PRESETS[args.preset], args)


if __name__ == "__main__":
    cli.run(main)
