"""Have the target itself answer prompts, for its draft to learn from: `python -m training.regenerate --help`."""

import argparse
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from convert import cli, compile_cache, progress
from convert.demo_target import find_demo_target
from convert.load import stop_token_ids, target_config
from convert.progress import tell
from convert.sources import Source, open_source
from dflash_jax import sharding
from dflash_jax.errors import UserError, check, memory_named
from inference import prompts, results
from inference.engine import Engine, Generation, SamplingConfig
from inference.flags import DTYPES, TOO_MUCH, add_sampling_flags, check_memory, flags_named, load_models, whole
from inference.results import in_order
from training import conversations
from training.completions import Completions
from training.endpoint import KEY, Endpoint
from training.rounds import Answer, Job, Rounds, Tally

EXAMPLE = f"""\
example:
  python -m training.regenerate --target Qwen/Qwen3-4B --data prompts.jsonl --output chats.jsonl \\
    --temperature 0.7 --top-p 0.8 --top-k 20

Each row of --data is {conversations.ROW}.
Answers that a chat has are dropped: every user's turn is answered anew. Each line of --output is one answer, with the
token ids of prompt and answer beside its text. The same command goes on where an earlier run of it ended.

--endpoint takes the URL of a server of the target, as http://host:8000/v1 (a URL without a path means /v1), and the
key that it may want from the environment variable {KEY}. A server that returns token ids, as vLLM does, is
right: from others the text is tokenized again, and where a stop ended it, the one that the chat template closes an
answer with is added.
"""
CONCURRENCY = 16


def main(argv: Sequence[str]) -> None:
    """Answer the rows that the arguments name.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    sampling = _checked(args)
    target = args.target or str(find_demo_target("--target"))
    source = open_source(target)
    positions = target_config(source).max_positions
    max_length = min(args.max_length, positions)
    check(
        args.max_new_tokens < max_length,
        f"--max-new-tokens: {args.max_new_tokens} leave no room for a prompt in --max-length {args.max_length}; "
        f"fewer, or more of the latter, are right (the target itself ends at {positions})",
    )
    tell(f"reading {args.data}")
    expected, tokenizer = _survey(args, source)
    answer, settings = _answer(args, target, source, sampling, tokenizer)
    job = Job(
        target=str(source.path.resolve()),
        tokenizer=tokenizer,
        settings=settings,
        max_new_tokens=args.max_new_tokens,
        max_length=max_length,
        seed=args.seed,
        thinking=args.thinking,
    )
    with memory_named(TOO_MUCH), results.open_results(args.output, resume=True) as file:
        rounds = Rounds(job, answer, file)
        new = rounds.run(conversations.read(args.data, args.num_prompts))
        first = next(new, None)  # by then the weights are read, which shows a progress of its own
        kept = rounds.tally.answers - (first is not None)
        if kept:
            tell(f"{kept} answers are there already")
        if first is not None:
            for _ in progress.show(itertools.chain([first], new), expected - kept, "answering"):
                pass
    _tell_end(rounds.tally)


def _tell_end(tally: Tally) -> None:
    for reason, count in tally.skipped.items():
        tell(f"skipped: {count} {reason}")
    check(tally.answers > 0, "--data: every prompt was skipped; one that fits into --max-length is right")
    line = f"{tally.answers} answers, {tally.tokens} tokens, {tally.stopped / tally.answers:.1%} ended by a stop"
    if tally.new_tokens:
        line += f", {tally.new_tokens / tally.seconds:.1f} tokens/s"
    if tally.emitted > tally.blocks:  # without a draft, each block is one token
        line += f", acceptance length {tally.emitted / tally.blocks:.2f}"
    print(line)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m training.regenerate",
        description="Have the target answer prompts itself, since a draft must learn what the target says.",
        epilog=EXAMPLE,
    )
    files = parser.add_argument_group("files")
    files.add_argument("--data", required=True, metavar="PROMPTS.jsonl", help="a prompt or a chat a row")
    files.add_argument("--output", required=True, metavar="CHATS.jsonl", help="an answer a line")
    files.add_argument("--num-prompts", type=whole(1), metavar="N", help="the first N rows (default: all)")
    models = parser.add_argument_group("models (a Flax checkpoint, a Hugging Face directory or a hub id)")
    models.add_argument("--target", metavar="T", help="may be a .gguf file, too (default: the demo's)")
    faster = models.add_mutually_exclusive_group()
    faster.add_argument("--draft", metavar="D", help="its draft, for speed")
    faster.add_argument("--endpoint", metavar="URL", help="a server of the target; its weights are not loaded here")
    models.add_argument("--dtype", choices=DTYPES, help=f"of the weights (default: {DTYPES[0]})")
    models.add_argument("--batch-size", type=whole(1), metavar="N", help="answers at a time (default: 8)")
    models.add_argument("--model", metavar="NAME", help="of the endpoint (default: the only one it serves)")
    models.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="N",
        help=f"requests to the endpoint at a time (default: {CONCURRENCY})",
    )
    answer = parser.add_argument_group("answers")
    answer.add_argument("--max-new-tokens", type=whole(1), default=1024, metavar="N", help="(default: 1024)")
    answer.add_argument(
        "--max-length",
        type=whole(2),
        default=2048,
        metavar="N",
        help="most tokens of a prompt and its answer; longer prompts are skipped (default: 2048)",
    )
    add_sampling_flags(answer)
    answer.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let a model think first that can (default: no)",
    )
    return parser


def _checked(args: argparse.Namespace) -> SamplingConfig:
    for flag, given, wanted in (
        ("--model", args.model, "--endpoint"),
        ("--concurrency", args.concurrency, "--endpoint"),
    ):
        check(given is None or args.endpoint is not None, f"{flag}: it needs {wanted}")
    for flag, given in (("--dtype", args.dtype), ("--batch-size", args.batch_size)):
        check(given is None or args.endpoint is None, f"{flag}: the server of --endpoint has its own; leave it out")
    for flag in ("target", "draft", "data", "output", "model"):
        check(getattr(args, flag) != "", f"--{flag}: empty; a name is right")
    same = os.path.exists(args.output) and os.path.exists(args.data) and os.path.samefile(args.output, args.data)
    check(not same, f"--output {args.output}: that is the file of prompts; another name is right")
    with flags_named():
        return SamplingConfig(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
        )


def _survey(args: argparse.Namespace, source: Source) -> tuple[int, Any]:
    """Read all rows once, so that none is refused after days of work; count their answers, and load the tokenizer."""
    rows = target_config(source).vocab_size
    expected = silent = 0
    spoken: str | None = None
    for row in conversations.read(args.data, args.num_prompts):
        expected += len(row.ahead)
        silent += not row.ahead
        spoken = spoken or (row.where if row.ids is None else None)
        for i in row.ids or ():
            check(0 <= i < rows, f"{row.where}: token id {i} is outside the vocabulary; 0 to {rows - 1} are in it")
    if silent:
        tell(f"rows that ask nothing, without a user's turn: {silent}")
    check(expected > 0, f"--data {args.data}: nothing to answer; a row {conversations.ROW} for each prompt is right")
    return expected, _tokenizer(args, source, spoken)


def _tokenizer(args: argparse.Namespace, source: Source, spoken: str | None) -> Any:
    """Load the tokenizer; where there is none, only prompts of token ids can be answered. `spoken` is another one."""
    try:
        tokenizer = source.tokenizer()
    except UserError as error:
        if spoken is not None:
            raise
        tell(f"answers will have no text: {error}")
        return None
    check(
        spoken is None or bool(tokenizer.chat_template),
        f"{spoken}: the target's tokenizer has no chat template; a target with one, or rows of prompt_ids, is right",
    )
    if args.thinking and not prompts.has_thinking_switch(tokenizer):
        tell("--thinking: the chat template has no such switch")
    return tokenizer


def _answer(
    args: argparse.Namespace, target: str, source: Source, sampling: SamplingConfig, tokenizer: Any
) -> tuple[Answer, dict[str, Any]]:
    """Return what answers, and the settings that stand in each line. A draft is none of them: it only changes speed."""
    names = ("max_new_tokens", "max_length", "temperature", "top_p", "top_k", "seed", "thinking")
    settings = {name: getattr(args, name) for name in names}
    if args.endpoint is None:
        return _own_answers(args, target, source, sampling), settings | {
            "dtype": args.dtype or DTYPES[0],
            "model": None,
        }
    endpoint = Endpoint(args.endpoint)
    model = endpoint.model(args.model)
    stops = stop_token_ids(source, target_config(source))
    served = Completions(endpoint, model, sampling, stops, tokenizer, args.concurrency or CONCURRENCY)
    return served.answer, settings | {"dtype": None, "model": model}


def _own_answers(args: argparse.Namespace, target: str, source: Source, sampling: SamplingConfig) -> Answer:
    @functools.cache
    def engine() -> Engine:
        return _engine(args, target, source)

    def answer(asked: Sequence[Sequence[int]], seed: int, skip: int) -> Iterator[Generation]:
        with flags_named():
            answers = engine().serve(asked, dataclasses.replace(sampling, seed=seed), skip=skip)
        return (so_far for _, so_far in in_order(answers, skip) if so_far.finish_reason)

    return answer


def _engine(args: argparse.Namespace, target: str, source: Source) -> Engine:
    compile_cache.keep()
    args.dtype, args.batch_size = args.dtype or DTYPES[0], args.batch_size or 8
    mesh = sharding.make_mesh()
    check_memory(args, target_config(source), mesh)
    own, draft = load_models(args, target, args.draft, mesh)
    with flags_named():
        engine = Engine(own, draft, max_length=args.max_length, batch_size=args.batch_size, mesh=mesh)
    compile_cache.tell_compiling()
    engine.warm_up()
    return engine


if __name__ == "__main__":
    cli.run(main)
