"""Time of a block and of a plain token on the demo pair, one row, greedy: `python -m benchmarks.decoding`.

Both kinds of answers alternate in one run, after a warm-up; times leave the prefill out.
"""

from collections.abc import Sequence

from convert import cli, load_tokenizer
from convert.demo_target import find_demo_target
from inference.demo import DEMO_DRAFT, QUESTIONS, Pace, compare
from inference.engine import Engine, SamplingConfig
from inference.prompts import encode, from_text


def main(argv: Sequence[str]) -> None:
    """Answer the demo's questions with room for a short and for a long text."""
    parser = cli.Parser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.parse_args(argv)
    target = str(find_demo_target())
    tokenizer = load_tokenizer(target)
    prompts = [encode(from_text(question, "question"), tokenizer) for question in QUESTIONS]
    for max_length in (512, 2048):
        engine = Engine.load(target, str(DEMO_DRAFT), max_length=max_length)
        sampling = SamplingConfig(max_new_tokens=128)
        drafted, plain = [], []
        for prompt in prompts:
            drafted += engine.generate([prompt], sampling)
            plain += engine.generate([prompt], sampling, speculate=False)
        block, token = Pace.of(drafted), Pace.of(plain)
        times = f"block {1e3 * block.block_seconds:.1f} ms, token {1e3 * token.block_seconds:.1f} ms"
        print(f"--max-length {max_length}: {times}")
        print(f"  {compare(block, token)}")


if __name__ == "__main__":
    cli.run(main)
