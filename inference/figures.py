"""The figures of a benchmark from its answers and times."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from inference.demo import first_difference
from inference.engine import Generation
from inference.measure import Measured, Pair
from inference.parts import Parts


def figures(measured: Measured, block_size: int | None, parts: Parts | None) -> dict[str, Any]:
    """Return what the JSON says of a combination.

    First tokens come from the prefill, and neither they nor its seconds count in a speed. A block's seconds are those
    of decoding over the blocks of all rows, a token's over the tokens of all rows; so with several rows each is a row's
    share of the batch's time, and where answers are equal the speedup is acceptance length over block cost.

    Args:
        measured: answers and seconds.
        block_size: tokens a block, or None where blocks differ.
        parts: shares of drafting and verifying in a block, where they were measured.
    """
    plain, drafted = [pair.plain for pair in measured.pairs], [pair.drafted for pair in measured.pairs]
    blocks = sum(len(answer.emitted_per_block) for answer in drafted)
    baseline = ratio(_tokens(plain), measured.plain_seconds)
    dflash = ratio(_tokens(drafted), measured.drafted_seconds)
    block, token = ratio(measured.drafted_seconds, blocks), ratio(measured.plain_seconds, _tokens(plain))
    return {
        "prompts": len(measured.pairs),
        "identical": sum(pair.plain.token_ids == pair.drafted.token_ids for pair in measured.pairs),
        "baseline_tokens_per_second": baseline,
        "dflash_tokens_per_second": dflash,
        "speedup": ratio(dflash, baseline),
        "acceptance_length": ratio(_tokens(drafted), blocks),
        "block_seconds": block,
        "token_seconds": token,
        "block_cost": ratio(block, token),
        "histogram": histogram(drafted, block_size),
        "by_slot": accepted_by_slot(drafted),
        "time_split": _time_split(measured, parts) if parts else None,
        "per_prompt": [_of_prompt(pair) for pair in measured.pairs],
    }


def ratio(one: float | None, other: float | None) -> float | None:
    """Divide; None where there is nothing to divide, or nothing to divide it by."""
    return one / other if one is not None and other else None


def histogram(answers: Sequence[Generation], block_size: int | None) -> list[int]:
    """Count the blocks that brought one token, two, and so on; those that the end of an answer cut count as cut."""
    counts = Counter(emitted for answer in answers for emitted in answer.emitted_per_block)
    return [counts[emitted] for emitted in range(1, (block_size or max(counts, default=0)) + 1)]


def accepted_by_slot(answers: Sequence[Generation]) -> list[float | None]:
    """Return the share of blocks whose drafts were accepted up to slot 1, slot 2, and so on.

    A block that the end of an answer cut inside its accepted drafts (its last token is one of them) says nothing of the
    slots after the cut. To leave it out of those would make them look worse, since a block of many accepted drafts is
    the likelier to be cut; so each slot's share is that of the slot before, times the share of accepted drafts among
    the blocks that were accepted so far and not yet cut. A block accepted whole says nothing of the slots that only
    longer ones have. None where no block came so far.
    """
    slots = max((size for answer in answers for size in answer.block_sizes), default=1) - 1
    judged, taken = [0] * slots, [0] * slots
    for answer in answers:
        end = 1
        for emitted, size in zip(answer.emitted_per_block, answer.block_sizes, strict=True):
            end += emitted
            cut = answer.drafted[end - 1]
            accepted = emitted if cut else emitted - 1
            for slot in range(accepted if cut else min(emitted, size - 1)):
                judged[slot] += 1
                taken[slot] += slot < accepted
    share: float | None = 1.0
    return [share := None if share is None or not n else share * k / n for k, n in zip(taken, judged, strict=True)]


def _tokens(answers: Sequence[Generation]) -> int:
    return sum(len(answer.token_ids) - 1 for answer in answers)


def _time_split(measured: Measured, parts: Parts) -> dict[str, float]:
    """Split the seconds that all answers took with the draft as a block's are split."""
    draft, verify = (share * measured.drafted_seconds for share in parts)
    return {
        "prefill_seconds": sum(pair.drafted.prefill_seconds for pair in measured.pairs),
        "draft_seconds": draft,
        "verify_seconds": verify,
        "rest_seconds": max(0.0, measured.drafted_seconds - draft - verify),
    }


def _of_prompt(pair: Pair) -> dict[str, Any]:
    plain, drafted = pair.plain, pair.drafted
    return {
        "where": pair.where,
        "turn": pair.turn,
        "prompt_tokens": len(pair.prompt),
        "new_tokens": len(drafted.token_ids),
        "finish_reason": drafted.finish_reason,
        "identical": plain.token_ids == drafted.token_ids,
        "first_difference": first_difference(plain.token_ids, drafted.token_ids),
        "baseline_new_tokens": len(plain.token_ids),
        "baseline_prefill_seconds": plain.prefill_seconds,
        "baseline_decode_seconds": plain.decode_seconds,
        "baseline_tokens_per_second": plain.tokens_per_second,
        "dflash_prefill_seconds": drafted.prefill_seconds,
        "dflash_decode_seconds": drafted.decode_seconds,
        "dflash_tokens_per_second": drafted.tokens_per_second,
        "speedup": ratio(drafted.tokens_per_second, plain.tokens_per_second),
        "acceptance_length": drafted.acceptance_length,
        "emitted_per_block": drafted.emitted_per_block,
    }
