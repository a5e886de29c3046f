"""Answer prompts with a target, sped up by a draft: `python -m inference.generate --help`."""

import argparse
import array
import collections
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from convert import cli, compile_cache, processes, progress
from convert.load import target_config
from convert.progress import tell
from convert.sources import Source, open_source
from dflash_jax import sharding
from dflash_jax.errors import UserError, check, memory_named
from inference import prompts, results
from inference.display import LEGEND, AnswerWriter, has_colours, summary
from inference.engine import Engine, Generation, SamplingConfig
from inference.flags import (
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
from inference.prompts import Prompt

EXAMPLE = """\
example:
  python -m inference.generate --ckpt Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --prompt "What is 17 * 23?"

Without --ckpt, a small demo pair answers. Each row of --prompts is {"prompt": "…"}, {"messages": […]} or
{"prompt_ids": […]}.
"""
# Of the settings in a result, those that change its tokens, and its dtype.
SETTINGS = ("temperature", "top_p", "top_k", "seed", "thinking", "dtype")
NO_FILE = -1


def main(argv: Sequence[str]) -> None:
    """Answer the prompts that the arguments name.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    sampling = _sampling(args)
    processes.join()
    compile_cache.keep()
    mesh = _mesh(args)
    asked = _read_prompts(args)
    ckpt, draft = checkpoints(args)
    with memory_named(TOO_MUCH):
        source = open_source(ckpt)
        check_memory(args, target_config(source), mesh)
        tokenizer = _tokenizer(args, source, asked)
        names = [prompt.where for prompt in asked]
        encoded = [_encoded(args, prompt, tokenizer) for prompt in asked]
        asked.clear()  # long texts need not wait for their answers
        others = (str(source.path.resolve()), sampling.max_new_tokens, sorted(sampling.stop_token_ids))
        asked_for = [results.digest(ids, *others) for ids in encoded]
        with _output(args, asked_for) as (file, done):
            if done == len(encoded):
                return tell(f"all {done} answers are there already")
            engine = _engine(args, ckpt, draft, mesh)
            for name, ids in zip(names, encoded, strict=True):
                with flags_named(name):
                    engine.check_prompt(ids, sampling, name)
            compile_cache.tell_compiling()
            engine.warm_up()
            live = not (args.json or args.output)
            answers = results.in_order(engine.serve(encoded, sampling, live=live, skip=done), done)
            if not processes.first():
                collections.deque(answers, maxlen=0)  # its devices decode, and its results are those of the first
            elif args.json or args.output:
                write = file.write if file else results.print_line
                settings = {"block_size": engine.block_size, **_settings(args)}
                ended = (answer for answer in answers if answer[1].finish_reason)
                for index, generation in progress.show(ended, len(encoded) - done, "answering") if file else ended:
                    known = settings | ({"asked": asked_for[index]} if file else {})
                    write(results.record(generation, tokenizer, len(encoded[index]), known))
            else:
                _show(answers, tokenizer, names, colours=draft is not None)
    return None


def _show(answers: Iterable[tuple[int, Generation]], tokenizer: Any, names: Sequence[str], *, colours: bool) -> None:
    """Write plain answers to standard output as they grow, and a line on each to standard error."""
    # A console that cannot show a character must not end the answer.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    colours = colours and has_colours(sys.stdout)
    if colours:
        print(LEGEND)
    writer: AnswerWriter | None = None
    for index, generation in answers:
        if writer is None:
            if len(names) > 1:
                tell(f"{names[index]}:")
            writer = AnswerWriter(tokenizer, sys.stdout, colours=colours)
        writer.show(generation)
        if generation.finish_reason:
            tell(summary(generation))
            writer = None


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m inference.generate",
        description="Answer prompts with a target model, sped up by a DFlash draft without changing the answers.",
        epilog=EXAMPLE,
    )
    models = parser.add_argument_group("models (a Flax checkpoint, a Hugging Face directory or a hub id)")
    add_model_flags(models, "its draft; without one, decoding is plain (default: none, or the demo's)")
    models.add_argument(
        "--block-size",
        type=block_size,
        metavar="B|auto",
        help="tokens that a pass of the target checks, or auto, which follows the text (default: the draft's)",
    )
    models.add_argument("--batch-size", type=whole(1), default=1, metavar="N", help="answers at a time (default: 1)")
    source = parser.add_argument_group("prompts (one of the three)")
    source.add_argument("--prompt", metavar="TEXT", help="a prompt")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="a prompt a row")
    source.add_argument("stdin", nargs="?", metavar="-", help="read a prompt from standard input")
    source.add_argument("--raw", action="store_true", help="take text as it is, without the chat template")
    add_thinking_flag(source)
    answer = parser.add_argument_group("answers")
    answer.add_argument("--max-new-tokens", type=whole(1), default=256, metavar="N", help="at most (default: 256)")
    add_sampling_flags(answer)
    answer.add_argument(
        "--stop", type=int, nargs="+", action="extend", default=[], metavar="TOKEN_ID", help="also ends an answer"
    )
    output = parser.add_argument_group("output (default: text as it comes)")
    output.add_argument("--json", action="store_true", help="write one JSON object a prompt")
    output.add_argument("--output", metavar="FILE.jsonl", help="write the objects into a file, each when it is done")
    output.add_argument("--resume", action="store_true", help="go on with what --output has of an earlier run")
    return parser


def _sampling(args: argparse.Namespace) -> SamplingConfig:
    with flags_named():
        return SamplingConfig(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            stop_token_ids=tuple(args.stop),
        )


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    check(args.output is not None or not args.resume, "--resume: it needs --output, the file to go on with")
    check(args.output != "", "--output: empty; a file's name is right")
    check(
        args.output is None or args.prompts is None or not _same_file(args.output, args.prompts),
        f"--output {args.output}: that is the file of prompts; another name is right",
    )
    check(args.stdin in (None, "-"), f"{args.stdin}: a prompt goes after --prompt; - reads one from standard input")
    given = [
        name
        for name, value in (("--prompt", args.prompt), ("--prompts", args.prompts), ("-", args.stdin))
        if value is not None
    ]
    check(
        len(given) == 1,
        f"{' and '.join(given) or 'no prompt'}; one of --prompt TEXT, --prompts FILE.jsonl and - (standard input) "
        "is right",
    )
    if args.prompts is not None:
        return prompts.from_file(args.prompts)
    if args.prompt is not None:
        return [prompts.from_text(args.prompt, "--prompt")]
    return [prompts.from_stream(sys.stdin.buffer, raw=args.raw)]


def _same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _tokenizer(args: argparse.Namespace, source: Source, asked: list[Prompt]) -> Any:
    """Load the tokenizer, or return None where neither prompts nor answers need one and there is none."""
    try:
        tokenizer = source.tokenizer()
    except UserError as error:
        if not (args.json or args.output) or any(prompt.ids is None for prompt in asked):
            raise
        tell(f"answers will have no text: {error}")
        return None
    if args.thinking and not prompts.has_thinking_switch(tokenizer):
        tell("--thinking: the chat template has no such switch")
    return tokenizer


def _encoded(args: argparse.Namespace, prompt: Prompt, tokenizer: Any) -> Sequence[int]:
    # Packed: there may be many thousands.
    return array.array("i", prompts.encode(prompt, tokenizer, raw=args.raw, thinking=args.thinking))


@contextlib.contextmanager
def _output(args: argparse.Namespace, asked_for: Sequence[str]) -> Iterator[tuple[results.ResultsFile | None, int]]:
    """Open the file of results where there is one, and count what it has; only the first process writes it."""
    if args.output is None:
        yield None, 0
    elif not processes.first():
        done = processes.agree(NO_FILE)
        if done == NO_FILE:
            raise UserError("--output: the first process tells what is wrong with it")
        yield None, done
    else:
        with contextlib.ExitStack() as opened:
            done = NO_FILE
            try:
                file = opened.enter_context(results.open_results(args.output, resume=args.resume))
                done = file.keep(asked_for, _settings(args))
            finally:
                processes.agree(done)
            yield file, done


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SETTINGS}


def _mesh(args: argparse.Namespace) -> Mesh:
    with flags_named():
        check(
            args.stdin is None or jax.process_count() == 1,
            "standard input: one process has it and the others do not; --prompts FILE.jsonl is right",
        )
        return sharding.make_mesh(**args.mesh)


def _engine(args: argparse.Namespace, ckpt: str, draft: str | None, mesh: Mesh) -> Engine:
    size = args.block_size if isinstance(args.block_size, int) else 1
    check(size <= args.max_length, f"--block-size: {size}; up to --max-length, {args.max_length}, is right")
    target, paired = load_models(args, ckpt, draft, mesh)
    with flags_named():
        return Engine(
            target,
            paired,
            max_length=args.max_length,
            batch_size=args.batch_size,
            block_size=args.block_size,
            mesh=mesh,
        )


def command() -> NoReturn:
    """Run as a command, with the arguments of the process."""
    cli.run(main)


if __name__ == "__main__":
    command()
