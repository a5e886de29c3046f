"""Measure what a draft brings: `python -m inference.benchmark --help`."""

import argparse
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from convert import LoadedDraft, LoadedTarget, cli, compile_cache, processes, progress
from convert.files import new_file, write_json
from convert.load import target_config
from convert.progress import tell
from convert.sources import open_source
from dflash_jax import sharding
from dflash_jax.errors import check, memory_named
from inference import questions, report, tables
from inference.engine import Engine, SamplingConfig
from inference.figures import figures
from inference.flags import (
    AUTO,
    TOO_MUCH,
    add_model_flags,
    add_sampling_flags,
    add_thinking_flag,
    block_size,
    check_memory,
    checkpoints,
    flags_named,
    load_models,
    whole,
)
from inference.measure import Asking, Measured, check_questions, measure
from inference.parts import part_shares
from inference.prompts import has_thinking_switch
from inference.questions import Question

EXAMPLE = f"""\
example:
  python -m inference.benchmark --ckpt Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --dtype bfloat16 \\
    --data gsm8k --num-prompts 128 --batch-size 1 8 --report report.html

Without --ckpt, a small demo pair is measured. --data is a JSONL file (or .jsonl.gz) whose rows are
{questions.ROW};
or the name of a set on the hub, asked in the reference's words:
{", ".join(questions.NAMED)}
(NAME=FILE takes the set's rows from a file). Several values of --data, --batch-size, --block-size and
--temperature make all combinations.
"""
SETTINGS = ("num_prompts", "max_new_tokens", "max_length", "top_p", "top_k", "seed", "thinking", "dtype", "mesh")
PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax")


def main(argv: Sequence[str]) -> None:
    """Measure the combinations that the arguments name.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    _check(args)
    samplings = {temperature: _sampling(args, temperature) for temperature in args.temperature}
    processes.join()
    compile_cache.keep()
    with flags_named():
        mesh = sharding.make_mesh(**args.mesh)
    ckpt, draft = checkpoints(args)
    with memory_named(TOO_MUCH):
        source = open_source(ckpt)
        check_memory(_hungriest(args), target_config(source), mesh)
        asked = {data: questions.read(data, args.num_prompts) for data in args.data}
        tokenizer = source.tokenizer()
        if args.thinking and not has_thinking_switch(tokenizer):
            tell("--thinking: the chat template has no such switch")
        target, paired = load_models(args, ckpt, draft, mesh)
        askings = {
            temperature: Asking(tokenizer, args.thinking, sampling) for temperature, sampling in samplings.items()
        }
        found: list[tuple[dict[str, Any], Measured]] = []
        try:
            for found in _measure_all(args, target, paired, mesh, asked, askings):
                # After each combination: what hours have found must not be lost with the last one.
                document = _document(args, ckpt, draft, mesh, [result for result, _ in found])
                measured = [measured for _, measured in found]
                processes.by_first(functools.partial(_write, args, document, measured, tokenizer))
        finally:
            if found and processes.first():
                tables.show([result for result, _ in found], sys.stdout)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m inference.benchmark",
        description="Answer the same prompts with a DFlash draft and without it, and compare speed and tokens.",
        epilog=EXAMPLE,
    )
    models = parser.add_argument_group("models (a Flax checkpoint, a Hugging Face directory or a hub id)")
    add_model_flags(models, "its draft (default: the demo's, for the demo's target)")
    asked = parser.add_argument_group("prompts")
    asked.add_argument(
        "--data", required=True, nargs="+", action="extend", metavar="FILE.jsonl|NAME", help="what is asked; see below"
    )
    asked.add_argument("--num-prompts", type=whole(1), metavar="N", help="the first N rows of each (default: all)")
    add_thinking_flag(asked)
    answers = parser.add_argument_group("answers")
    answers.add_argument("--max-new-tokens", type=whole(2), default=256, metavar="N", help="at most (default: 256)")
    answers.add_argument(
        "--batch-size", type=whole(1), nargs="+", default=[1], metavar="N", help="answers at a time (default: 1)"
    )
    answers.add_argument(
        "--block-size",
        type=block_size,
        nargs="+",
        metavar="B|auto",
        help="tokens that a pass of the target checks (default: the draft's)",
    )
    add_sampling_flags(answers, several=True)
    output = parser.add_argument_group("output (beside the tables)")
    output.add_argument("--json", metavar="OUT.json", help="every figure, for programs")
    output.add_argument("--report", metavar="OUT.html", help="a page with pictures, which needs no network")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be told to be wrong before anything is loaded; a run may take hours."""
    check(
        args.ckpt is None or args.draft is not None,
        "--draft: missing; the draft of --ckpt, which is what is measured, is right",
    )
    for flag, values in (
        ("--data", args.data),
        ("--temperature", args.temperature),
        ("--batch-size", args.batch_size),
        ("--block-size", args.block_size or []),
    ):
        check(len({*values}) == len(values), f"{flag}: a value more than once; each once is right")
    read = [file.resolve() for data in args.data if (file := questions.check_name(data))]
    largest = max((size for size in args.block_size or [] if size != AUTO), default=2)
    check(
        largest <= args.max_length,
        f"--block-size: {largest}; up to --max-length, {args.max_length}, is right",
    )
    for flag, name in (("--json", args.json), ("--report", args.report)):
        if name is not None:
            file = Path(name)
            check(
                bool(name) and (file.is_file() or not file.exists()),
                f"{flag} {name!r}: no name of a file; one is right",
            )
            check(
                file.parent.is_dir() and os.access(file.parent, os.W_OK),
                f"{flag} {name}: {file.parent} is no directory that can be written to; one that is there is right",
            )
            check(
                file.resolve() not in read,
                f"{flag} {name}: that is the file of prompts; another name is right",
            )
    check(
        args.json is None or args.report is None or Path(args.json).resolve() != Path(args.report).resolve(),
        f"--json and --report: both {args.json}; two names are right",
    )


def _sampling(args: argparse.Namespace, temperature: float) -> SamplingConfig:
    with flags_named():
        return SamplingConfig(
            max_new_tokens=args.max_new_tokens,
            temperature=temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
        )


def _hungriest(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags as memory sees them: the engines of all block sizes are there at once, each with its caches."""
    return argparse.Namespace(**vars(args) | {"batch_size": max(args.batch_size) * len(args.block_size or [None])})


def _measure_all(
    args: argparse.Namespace,
    target: LoadedTarget,
    draft: LoadedDraft | None,
    mesh: Mesh,
    asked: dict[str, list[Question]],
    askings: dict[float, Asking],
) -> Iterator[list[tuple[dict[str, Any], Measured]]]:
    """Measure every combination; after each, yield the results and the answers of all so far, data set by data set."""
    sizes: list[Any] = args.block_size or [None]
    order = list(itertools.product(args.data, args.temperature, args.batch_size, sizes))
    found: dict[Any, tuple[dict[str, Any], Measured]] = {}
    for rows in args.batch_size:
        engines: list[Engine] = []  # those of the last batch size let go of their caches
        with flags_named():
            engines = [
                Engine(target, draft, max_length=args.max_length, batch_size=rows, block_size=size, mesh=mesh)
                for size in sizes
            ]
        for data, temperature in itertools.product(asked, askings):
            check_questions(engines[0], asked[data], askings[temperature])
        for data, temperature in itertools.product(asked, askings):
            tell(f"{data}, batch size {rows}, temperature {temperature:g}: compiling, then answering")
            measured = measure(engines, asked[data], askings[temperature], rows, progress.show)
            for size, engine, one in zip(sizes, engines, measured, strict=True):
                own = None if size == AUTO else int(engine.block_size)
                parts = None if size == AUTO else part_shares(engine)
                named = {
                    "data": data,
                    "temperature": temperature,
                    "batch_size": rows,
                    "block_size": own or AUTO,
                }
                found[data, temperature, rows, size] = (named | figures(one, own, parts), one)
            yield [found[combination] for combination in order if combination in found]


def _write(args: argparse.Namespace, document: dict[str, Any], measured: list[Measured], tokenizer: Any) -> None:
    """Write the files that were asked for."""
    if args.json:
        with new_file(Path(args.json)) as file:
            write_json(file, document)
    if args.report:
        with new_file(Path(args.report)) as file:
            file.write_text(report.page(document, measured, tokenizer), encoding="utf-8")


def _document(
    args: argparse.Namespace, ckpt: str, draft: str | None, mesh: Mesh, results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return all that `--json` says: where one combination was asked for, its keys stand at the top, too."""
    asked = math.prod(
        len(values or [None]) for values in (args.data, args.temperature, args.batch_size, args.block_size)
    )
    [device, *_] = jax.local_devices()
    return {
        "results": results,
        "combinations": asked,  # more than there are results, if it was interrupted
        **(results[0] if asked == 1 else {}),
        "machine": {
            "device": device.device_kind if device.platform != "cpu" else _cpu(),
            "backend": device.platform,
            "devices": mesh.size,
            "cpu": _cpu(),
            "cores": os.cpu_count(),
        },
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
        "settings": {"ckpt": ckpt, "draft": draft} | {name: getattr(args, name) for name in SETTINGS},
    }


def _cpu() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command() -> NoReturn:
    """Run as a command, with the arguments of the process."""
    cli.run(main)


if __name__ == "__main__":
    command()
