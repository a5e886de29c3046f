"""Say how well a draft would be accepted, from prepared answers: `python -m training.evaluate --help`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import LoadedDraft, LoadedTarget, cli, compile_cache, load_draft, load_target, progress
from convert.demo_target import find_demo_target
from convert.load import target_config
from convert.sources import open_source
from dflash_jax import reading, sharding
from dflash_jax.anchors import Anchors, candidates
from dflash_jax.config import check_pair
from dflash_jax.errors import UserError, check, memory_named
from dflash_jax.parameters import Params
from training.config import DTYPES
from training.evaluation import judge, walk
from training.prepared import Prepared, Row, check_tokenizer, open_prepared
from training.step import Batch, Task, read_target

EXAMPLE = """\
example:
  python -m training.evaluate --target Qwen/Qwen3-4B --draft runs/qwen3-4b/draft --data held-out

--data is what `python -m training.prepare` wrote. The walk goes through each answer as greedy decoding would; where the
answers are the target's own greedy ones, its blocks are those of decoding.
"""
# Shapes for which programs are compiled: documents are filled up to these tokens, or twice, four times, … as many; and
# blocks come so many at a time.
TOKENS, BLOCKS = 128, 64
TOO_MUCH = (
    "--target, --draft, --data: the models and the longest documents ask for more memory than there is; "
    "--dtype bfloat16 is right"
)


def main(argv: Sequence[str]) -> None:
    """Evaluate the draft that the arguments name.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    check(args.target != "", "--target: empty; a checkpoint, or leaving out --target, is right")
    compile_cache.keep()
    prepared = open_prepared(args.data)
    name = args.target or str(find_demo_target("--target"))
    source = open_source(name)
    target_config(source)
    check_tokenizer(prepared, source)
    with memory_named(TOO_MUCH):
        target = load_target(name, args.dtype, watch=progress.show)
        draft = load_draft(args.draft, args.dtype, watch=progress.show)
    check(
        draft.config.is_bare,
        f"--draft {args.draft}: it has a head of its own, and cannot be judged here; a draft that scores with the "
        "target's is right",
    )
    try:
        check_pair(target.config, draft.config)
    except UserError as error:
        raise UserError(f"--draft {args.draft}: not a draft for this target: {error}") from error
    check(
        bool((prepared.supervised > 1).any()),
        f"--data {args.data}: no answer of two tokens or more to judge; rows with longer ones are right",
    )
    longest = int(prepared.lengths.max())
    most = target.config.max_positions
    check(longest <= most, f"--data {args.data}: a document of {longest} tokens; the target ends at {most}")
    with memory_named(TOO_MUCH):
        found = evaluate(target, draft, prepared, args.dtype)
    print(json.dumps(found) if args.json else _text(found))


def evaluate(target: LoadedTarget, draft: LoadedDraft, prepared: Prepared, dtype: str) -> dict[str, Any]:
    """Judge a draft at every anchor of every document, and walk every answer. The target's layers are taken over.

    Returns:
        `acceptance_length_random`: the mean tokens a block over all anchors, which is what random ones give on average;
        `acceptance_length_walk`, over the blocks of all walks; `accuracy_by_slot`, at all anchors where the slot is
        supervised; `walks`, for each input row in order the tokens emitted a block.
    """
    mesh = sharding.make_mesh()
    task = Task.for_judging(target.config, draft.config, BLOCKS, dtype, mesh)
    weights = reading.stack(mesh, target.config, draft.config.target_layer_ids, target.params, through=False)
    right, counted = np.zeros((2, draft.config.block_size - 1), np.int64)
    tokens = blocks = 0
    walks: dict[int, list[int]] = {}
    for index in progress.show(range(len(prepared)), len(prepared), "evaluating"):
        row = prepared[index]
        accepted: dict[int, int] = {}
        for anchor, hits, weighted in _judged(task, weights, draft, row):
            right, counted = right + hits, counted + weighted
            accepted[anchor] = int(np.cumprod(hits).sum())
        tokens, blocks = tokens + sum(accepted.values()), blocks + len(accepted)
        walks.setdefault(int(prepared.lines[index]), []).extend(walk(accepted, row.supervised))
    walked = [emitted for blocks_of_row in walks.values() for emitted in blocks_of_row]
    return {
        "acceptance_length_random": 1 + tokens / blocks if blocks else None,
        "acceptance_length_walk": sum(walked) / len(walked) if walked else None,
        "accuracy_by_slot": [float(one / all_) if all_ else None for one, all_ in zip(right, counted, strict=True)],
        "walks": list(walks.values()),
    }


def _judged(task: Task, target: Params, draft: LoadedDraft, row: Row) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield every anchor of a document, which slots of its block are right, and which are supervised."""
    size = len(row.tokens)
    room = TOKENS << ((size - 1) // TOKENS).bit_length()
    starts = np.where(np.arange(room) < size, 0, size)
    batch = Batch(
        jnp.asarray(np.pad(row.tokens, (0, room - size))[None]),
        jnp.asarray(np.pad(row.supervised, (0, room - size))[None]),
        jnp.asarray(starts[None], jnp.int32),
    )
    batch = read_target(task, target, batch)
    rows = np.flatnonzero(np.asarray(candidates(batch.supervised, batch.starts)[0]))
    for first in range(0, len(rows), BLOCKS):
        some = rows[first : first + BLOCKS]
        padded = np.pad(some, (0, BLOCKS - len(some)))
        valid = np.arange(BLOCKS) < len(some)
        anchors = Anchors(jnp.asarray(padded[None], jnp.int32), jnp.asarray(valid[None]))
        judged = jax.device_get(judge(task, target, draft.params, batch, anchors))
        yield from zip(some.tolist(), judged.right[0], judged.weighted[0], strict=False)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m training.evaluate",
        description="Say how many tokens a block of a draft would bring, at all anchors and as decoding walks answers.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--target", metavar="T", help="the target (default: the demo's)")
    parser.add_argument("--draft", metavar="D", required=True, help="its draft")
    parser.add_argument("--data", metavar="DIR", required=True, help="prepared rows")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="in which both compute (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every walk")
    return parser


def _text(found: dict[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    return "\n".join(
        (
            f"acceptance length  {shown(found['acceptance_length_random'])} at all anchors, "
            f"{shown(found['acceptance_length_walk'])} walking {len(found['walks'])} rows",
            f"accuracy by slot   {'  '.join(map(shown, found['accuracy_by_slot']))}",
        )
    )


if __name__ == "__main__":
    cli.run(main)
