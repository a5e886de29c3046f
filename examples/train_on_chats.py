"""Train a draft on your own chats, and decode with it: `python examples/train_on_chats.py --help`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from convert import cli
from convert.demo_target import find_demo_target
from inference import generate
from training import evaluate, prepare, run

EXAMPLE = """\
example:
  python examples/train_on_chats.py chats.jsonl --output my-draft --train.steps 200

Flags that are not listed go to training.run, after those of a run that takes a few minutes. With another target,
--draft.mask-token-id is one of them. A draft should learn what the target itself says: `python -m training.regenerate`
has it answer the chats anew.
"""
# A few short rows and steps, on one device; all else is as the preset `tiny` has it.
SHORT = ("--train.length=128", "--train.anchors=32", "--train.batch-size=4", "--train.steps=40", "--mesh.fsdp=1")


def chats(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return chats as a file of them has a row each: a user's message, and the answer to learn."""
    made = []
    for i in range(count):
        one, other = 10 + 7 * i % 40, 3 + 5 * i % 30
        question = f"What is {one} plus {other}?"
        told = f"We add {other} to {one}: {one} + {other} = {one + other}. The answer is {one + other}."
        made.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": told}]})
    return made


def train(data: Path, target: str, output: Path, settings: Sequence[str]) -> Path:
    """Make token ids of chats, train a draft on them, print how good it is there, and return where it lies."""
    prepared, trained = output / "prepared", output / "run"
    prepare.main(["--target", target, "--data", str(data), "--output", str(prepared)])
    run.main(["tiny", "--target", target, "--data", str(prepared), "--output", str(trained), *settings])
    draft = trained / "draft"
    evaluate.main(["--target", target, "--draft", str(draft), "--data", str(prepared)])
    return draft


def main(argv: Sequence[str]) -> None:
    """Train, then answer a question with the draft.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args, others = _parser().parse_known_args(argv)
    target = args.target or str(find_demo_target("--target"))
    with tempfile.TemporaryDirectory() as directory:
        output = Path(args.output or directory)
        data = Path(args.chats or f"{directory}/chats.jsonl")
        if not args.chats:
            data.write_text("".join(json.dumps(chat) + "\n" for chat in chats(60)))
        draft = train(data, target, output, [*SHORT, *others])
        prompt = ["--prompt", args.prompt, "--max-new-tokens", "40", "--max-length", "512"]
        generate.main(["--ckpt", target, "--draft", str(draft), *prompt])


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python examples/train_on_chats.py",
        usage="%(prog)s [CHATS.jsonl] [--target T] [--output DIR] [--section.field value …]",
        description="Train a draft on chats with a few steps, judge it, and answer a question with it.",
        epilog=EXAMPLE,
    )
    parser.add_argument("chats", nargs="?", metavar="CHATS.jsonl", help="a chat a row (default: some sums)")
    parser.add_argument("--target", metavar="T", help="whose draft it is (default: the demo's)")
    parser.add_argument("--output", metavar="DIR", help="what to keep it all in (default: nothing is kept)")
    parser.add_argument("--prompt", metavar="TEXT", default="What is 15 plus 8?", help="what to answer in the end")
    return parser


if __name__ == "__main__":
    cli.run(main)
