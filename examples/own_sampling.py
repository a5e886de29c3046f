"""Decode with your own way to choose tokens, here min-p: `python examples/own_sampling.py --help`.

The engine chooses greedily, or by temperature, top-k and top-p. Any other rule will do, if a choice depends on the
logits that judge it and on its position alone, random key included: then the draft changes the speed, and no token.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from convert import cli, compile_cache, load_draft, load_target, load_tokenizer, progress
from convert.demo_target import find_demo_target
from dflash_jax import masks, sharding
from dflash_jax.acceptance import accepted, emission
from dflash_jax.attention import PIECE
from dflash_jax.config import check_pair
from dflash_jax.errors import check
from dflash_jax.sampling import Policy
from inference import decode, prompts
from inference.decode import DecodeState, Models, Request, Weights
from inference.demo import DEMO_DRAFT, QUESTIONS, first_difference
from inference.flags import whole

EXAMPLE = """\
example:
  python examples/own_sampling.py --min-p 0.05 --temperature 1.5 --seed 3
"""


class MinP(NamedTuple):
    """Our rule: a token stays if it is at least `min_p` times as likely as the likeliest, at this temperature."""

    temperature: Float[Array, ""]
    min_p: Float[Array, ""]
    key: Key[Array, ""]


def choose(rule: MinP, logits: Float[Array, "b t v"], positions: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Choose the token of each position from the logits that judge it, with a key of the position's own."""
    scores = logits / rule.temperature
    kept = scores >= scores.max(axis=-1, keepdims=True) + jnp.log(rule.min_p)
    keys = jax.vmap(jax.vmap(functools.partial(jax.random.fold_in, rule.key)))(positions)
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, jnp.where(kept, scores, -jnp.inf))


def decode_block(models: Models, weights: Weights, rule: MinP, state: DecodeState) -> DecodeState:
    """Draft a block, judge it in one pass of the target, and commit what our rule agrees with, and one choice more."""
    anchors = decode.anchor_tokens(state)
    drafts = decode.propose(models, weights, anchors, state.draft, state.lengths)
    block = jnp.concatenate([anchors, drafts], axis=1)
    hidden, features, target = decode.run_target(models, weights, block, state.target, state.lengths)
    # What the target computed is what later blocks are drafted from.
    draft = decode.extend_context(models, weights, features, state.draft, state.lengths)
    state = state._replace(target=target, draft=draft)
    # The logits of a slot judge the position after it.
    judged = masks.positions(state.lengths, models.block_size) + 1
    chosen = choose(rule, decode.target_logits(models, weights, hidden), judged)
    return decode.commit(state, chosen, accepted(chosen, drafts))


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def decode_blocks(
    models: Models, weights: Weights, rule: MinP, state: DecodeState, hidden: Float[Array, "1 1 d"]
) -> DecodeState:
    """Decode an admitted row to its end, on the device; `hidden` is the prompt's last state, from the prefill."""
    # `admit` chose the first token as the engine does; ours takes its place.
    first = choose(rule, decode.target_logits(models, weights, hidden), state.lengths[:, None])
    end = emission(first, jnp.ones_like(state.lengths), state.stops, state.last - state.lengths + 1)
    state = state._replace(
        tokens=state.tokens.at[0, state.lengths[0]].set(first[0, 0]),
        finish=jnp.where(end.stopped, decode.STOPPED, jnp.where(end.full, decode.FULL, decode.RUNNING)),
    )
    step = functools.partial(decode_block, models, weights, rule)
    return jax.lax.while_loop(lambda now: (now.finish == decode.RUNNING).any(), step, state)


def answer(
    models: Models, weights: Weights, rule: MinP, prompt: Sequence[int], stops: Sequence[int], new_tokens: int
) -> tuple[list[int], int]:
    """Answer a prompt of token ids with up to `new_tokens` of them; return those, and the number of blocks."""
    rows = len(prompt) + new_tokens + models.block_size  # a whole block may be written at the last position
    rows = -(-rows // PIECE) * PIECE  # attention reads whole pieces
    row, length = jnp.int32(0), len(prompt)
    request = Request(
        prompt_length=jnp.int32(length),
        last=jnp.int32(length + new_tokens - 1),
        stops=jnp.asarray([*stops, *[-1] * (decode.MAX_STOPS - len(stops))], jnp.int32),
        policy=Policy(jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1), *jnp.zeros((2, 1), jnp.uint32)),
    )
    state = decode.empty_state(models, 1, rows, jnp.dtype("float32"))
    tokens = jnp.asarray([prompt], jnp.int32)
    state, hidden = decode.prefill(models, weights, state, row, tokens, jnp.int32(0), jnp.int32(length - 1))
    state = decode.admit(models, weights, state, row, hidden, request)
    state = decode_blocks(models, weights, rule, state, hidden)
    return state.tokens[0, length : int(state.lengths[0]) + 1].tolist(), int(state.blocks[0])


def main(argv: Sequence[str]) -> None:
    """Answer a question with the draft and without it, and compare.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    check(args.temperature > 0, f"--temperature: {args.temperature}; a number over 0 is right")
    check(0 < args.min_p <= 1, f"--min-p: {args.min_p}; a number over 0 and up to 1 is right")
    compile_cache.keep()
    ckpt = args.ckpt or str(find_demo_target())
    tokenizer = load_tokenizer(ckpt)
    prompt = prompts.encode(prompts.from_text(args.prompt, "--prompt"), tokenizer)
    target = load_target(ckpt, "float32", watch=progress.show)
    draft = load_draft(args.draft, "float32", watch=progress.show)
    check_pair(target.config, draft.config)
    room = target.config.max_positions - len(prompt)
    check(args.max_new_tokens <= room, f"--max-new-tokens: {args.max_new_tokens}; the target has room for {room}")

    mesh = sharding.make_mesh(devices=jax.local_devices())
    rule = MinP(jnp.float32(args.temperature), jnp.float32(args.min_p), jax.random.key(args.seed))
    asked = (rule, prompt, target.stop_token_ids, args.max_new_tokens)
    speculative = Models(target.config, draft.config, draft.config.block_size, mesh)
    drafted, blocks = answer(speculative, Weights(target.params, draft.params), *asked)
    plain, passes = answer(Models(target.config, None, 1, mesh), Weights(target.params, {}), *asked)

    print(f"> {args.prompt}\n{tokenizer.decode(drafted, skip_special_tokens=True)}\n")
    # The first token comes from the prefill, not from a block.
    length = f", acceptance length {(len(drafted) - 1) / blocks:.2f}" if blocks else ""
    print(f"With the draft: {len(drafted)} tokens in {blocks} blocks{length}.")
    at = first_difference(drafted, plain)
    same = "the same tokens" if at is None else f"other tokens, from number {at + 1} on"
    print(f"Without it: {same}, in {passes} passes of the target.")


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python examples/own_sampling.py",
        description="Answer a question by min-p, with a draft and without it, and compare.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--ckpt", metavar="T", help="the target (default: the demo's)")
    parser.add_argument("--draft", metavar="D", default=str(DEMO_DRAFT), help="its draft (default: the demo's)")
    parser.add_argument("--prompt", metavar="TEXT", default=QUESTIONS[0], help="what to answer")
    parser.add_argument("--max-new-tokens", type=whole(1), metavar="N", default=96, help="at most (default: 96)")
    parser.add_argument("--min-p", type=float, metavar="P", default=0.1, help="of the likeliest (default: 0.1)")
    parser.add_argument("--temperature", type=float, metavar="X", default=1.0, help="over 0 (default: 1)")
    parser.add_argument("--seed", type=whole(0), metavar="N", default=0, help="of sampling (default: 0)")
    return parser


if __name__ == "__main__":
    cli.run(main)
