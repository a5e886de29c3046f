"""Peak memory of a run against what it must hold: `python -m benchmarks.memory [--ckpt T] [--draft D]`.

Prints the process's resident memory before the weights, what weights and caches take by their sizes, and the peak.
"""

import resource
from collections.abc import Sequence

import jax

from convert import cli
from convert.demo_target import find_demo_target
from inference.demo import DEMO_DRAFT
from inference.engine import Engine, SamplingConfig

MIB = 2**20


def main(argv: Sequence[str]) -> None:
    """Load a pair, answer a prompt with and without the draft, and compare."""
    parser = cli.Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--ckpt")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(argv)
    ckpt, draft = args.ckpt or str(find_demo_target()), args.draft
    if args.ckpt is None:
        draft = draft or str(DEMO_DRAFT)
    before = _peak()
    engine = Engine.load(ckpt, draft, dtype=args.dtype)
    for speculate in (True, False) if draft else (False,):
        engine.generate([list(range(100))], SamplingConfig(max_new_tokens=32), speculate)
    weights, caches = engine.held_bytes()
    peak = _peak()
    print(f"before the weights  {before / MIB:7.0f} MiB  (interpreter and libraries)")
    print(f"weights             {weights / MIB:7.0f} MiB")
    print(f"caches              {caches / MIB:7.0f} MiB")
    print(f"peak                {peak / MIB:7.0f} MiB")
    print(f"peak over weights and caches: {peak / (weights + caches):.2f}")
    print(f"beside them and what was there before: {(peak - before - weights - caches) / MIB:.0f} MiB")


def _peak() -> int:
    jax.devices()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    cli.run(main)
