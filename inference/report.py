"""A benchmark's results as one page of HTML: inline style and pictures, no scripts, nothing from elsewhere."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from inference import tables
from inference.engine import Generation
from inference.measure import Measured, Pair
from inference.report_charts import LETTERS, Bar, Part, bars, columns, escape, stack
from inference.tables import number
from inference.text import Detokenizer, spoken

ANSWERS_SHOWN = 3
LONGEST_PROMPT = 600
NEWLINE, RETURN = "\n", "↵\n"
Result = dict[str, Any]
# An answer's pieces: the text of a token, and whether it was an accepted draft.
Piece = tuple[str, bool]


def page(document: dict[str, Any], measured: Sequence[Measured], tokenizer: Any) -> str:
    """Return the page.

    Args:
        document: what `--json` says.
        measured: the answers of each of its results, of which a few are shown.
        tokenizer: a transformers tokenizer.
    """
    results = document["results"]
    sections = [_combination(result, one, tokenizer) for result, one in zip(results, measured, strict=True)]
    style = resources.files("inference").joinpath("report.css").read_text(encoding="utf-8")
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>DFlash benchmark</title>
<style>
{style}</style>
</head>
<body>
<h1>DFlash benchmark</h1>
{_head(document)}
{_tiles(results[0]) if len(results) == 1 else ""}
{_overview(results)}
{"".join(sections)}
{_foot(document)}
</body>
</html>
"""


def blocks_of(answer: Generation, tokenizer: Any) -> list[list[Piece]]:
    """Return an answer's text block by block, the first token (from the prefill) as a block of its own.

    A character of several tokens stands with the last of them. The stop token that ended the answer has no text.
    """
    detokenizer = Detokenizer(tokenizer)
    pieces = [
        (detokenizer.push([token]), drafted) for token, drafted in zip(spoken(answer), answer.drafted, strict=False)
    ]
    pieces.append((detokenizer.finish(), False))
    blocks, end = [], 0
    for emitted in [1, *answer.emitted_per_block]:
        blocks.append(pieces[end : end + emitted])
        end += emitted
    blocks[-1] += pieces[end:]
    told = [[piece for piece in block if piece[0]] for block in blocks]
    return [block for block in told if block]


def _head(document: dict[str, Any]) -> str:
    machine, settings = document["machine"], document["settings"]
    count = machine["devices"]
    device = f"{count} × {machine['device']}" if count > 1 else machine["device"]
    return (
        f"<p>{escape(_last(settings['ckpt']))} with the draft {escape(_last(settings['draft']))}, "
        f"{escape(settings['dtype'])}, up to {settings['max_new_tokens']} new tokens, on {escape(device)} "
        f"({escape(machine['backend'])}, {machine['cores']} cores).</p>"
    )


def _tiles(result: Result) -> str:
    tiles = (
        (f"{number(result['speedup'])}×", "speedup"),
        (number(result["acceptance_length"]), "acceptance length τ, tokens a block"),
        (number(result["baseline_tokens_per_second"], 1), "tokens/s without the draft"),
        (number(result["dflash_tokens_per_second"], 1), "tokens/s with it"),
        (f"{result['identical']} of {result['prompts']}", "prompts with identical tokens"),
    )
    drawn = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in tiles)
    return f'<div class="tiles">{drawn}</div>'


def _overview(results: Sequence[Result]) -> str:
    labels = _labels(results)
    speedups = [
        Bar(label, result["speedup"], f"{number(result['speedup'])}×")
        for label, result in zip(labels, results, strict=True)
    ]
    lengths = [
        Bar(label, result["acceptance_length"], number(result["acceptance_length"]))
        for label, result in zip(labels, results, strict=True)
    ]
    pictures = [
        _figure("Speedup", bars("Speedup", speedups, mark=1.0), "The dashed line is decoding without the draft."),
        _figure(
            "Acceptance length τ",
            bars("Acceptance length", lengths, mark=1.0),
            "Tokens a block; the dashed line is decoding without the draft.",
        ),
    ]
    return f"<h2>Speedup and acceptance</h2>{_figures(pictures)}{_table(results)}"


def _table(results: Sequence[Result]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in tables.HEADS)
    cells = [tables.row(result) for result in results]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f'<p></p><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _combination(result: Result, measured: Measured, tokenizer: Any) -> str:
    pictures = []
    if result["by_slot"]:
        pictures.append(
            _figure(
                "Acceptance by slot",
                columns("Acceptance by slot", result["by_slot"]),
                "Share of blocks whose drafts were accepted up to this slot, in per cent.",
            )
        )
    counts = result["histogram"]
    lengths = [count / (sum(counts) or 1) for count in counts]
    pictures.append(
        _figure(
            "Blocks by length",
            columns("Blocks by length", lengths, max(lengths, default=0.0) or 1.0),
            "Share of blocks that brought so many tokens, in per cent.",
        )
    )
    if split := result["time_split"]:
        parts = [
            Part("prefill", split["prefill_seconds"], "prefill"),
            Part("draft", split["draft_seconds"], "drafted"),
            Part("verify", split["verify_seconds"], "target"),
            Part("rest", split["rest_seconds"], "rest"),
        ]
        pictures.append(
            _figure(
                "Time with the draft",
                stack("Time with the draft", parts),
                "Draft and verify are estimates: their shares of a block, timed as programs of their own in turns with "
                "whole blocks, the median of a few rounds. The rest is what a block of the decoding loop takes beyond.",
            )
        )
    return (
        f"<h2>{escape(tables.name(result))}</h2><p>{escape(_sentence(result))}</p>"
        f"{_figures(pictures)}{_answers(measured.pairs, tokenizer)}"
    )


def _sentence(result: Result) -> str:
    said = tables.sameness(result)
    if result["block_cost"] is not None:
        said += (
            f". A block takes {1e3 * result['block_seconds']:.1f} ms, a token without the draft "
            f"{1e3 * result['token_seconds']:.1f} ms: a block costs {result['block_cost']:.2f} tokens and brings "
            f"{result['acceptance_length']:.2f}"
        )
    return f"{said[0].upper()}{said[1:]}."


def _answers(pairs: Sequence[Pair], tokenizer: Any) -> str:
    """Draw the first answers."""
    drawn = "".join(_answer(pair, tokenizer) for pair in pairs[:ANSWERS_SHOWN])
    shown = f"{min(len(pairs), ANSWERS_SHOWN)} of {len(pairs)}"
    return (
        f'<details open="open"><summary>Answers, block by block: {shown}</summary>'
        f'<p class="key">A frame is a block. <span class="drafted">Accepted drafts</span> '
        f'<span class="target">the target\'s own tokens</span></p>{drawn}</details>'
    )


def _answer(pair: Pair, tokenizer: Any) -> str:
    prompt = pair.said or tokenizer.decode(pair.prompt)
    short = prompt if len(prompt) <= LONGEST_PROMPT else f"{prompt[:LONGEST_PROMPT]}…"
    blocks = "".join(_block(block) for block in blocks_of(pair.drafted, tokenizer))
    length = number(pair.drafted.acceptance_length)
    return (
        f'<div class="answer"><p class="quiet">{escape(short.strip())}</p><p class="text">{blocks}</p>'
        f'<p class="quiet">{len(pair.drafted.token_ids)} tokens, {len(pair.drafted.emitted_per_block)} blocks, '
        f"acceptance length {length}, ended by {pair.drafted.finish_reason}</p></div>"
    )


def _block(pieces: Sequence[Piece]) -> str:
    """Draw a block; the ends of lines are seen."""
    drawn = "".join(
        f'<span class="{"drafted" if drafted else "target"}">{escape(text.replace(NEWLINE, RETURN))}</span>'
        for text, drafted in pieces
    )
    return f'<span class="block">{drawn}</span>'


def _foot(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    settings = ", ".join(
        f"{name} {value}" for name, value in document["settings"].items() if value and name not in ("ckpt", "draft")
    )
    return (
        "<h2>How it was measured</h2>"
        '<p class="quiet">The same prompts were answered with the draft and without it, in turns, in one warm '
        "process. Speeds are tokens after each answer's first over the seconds of decoding, prefill excluded; of "
        "several rows, all tokens over the seconds of the whole batch. A block that the end of its answer cut counts "
        f'by slot up to the cut.</p><p class="quiet">{escape(versions)}. {escape(settings)}.</p>'
    )


def _figures(pictures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(pictures)}</div>'


def _figure(title: str, picture: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _labels(results: Sequence[Result]) -> list[str]:
    """Return what tells combinations apart: the data, shortened to fit, and whatever is not the same in all."""
    varied = [key for key in ("temperature", "batch_size", "block_size") if len({one[key] for one in results}) > 1]
    labels = []
    for one in results:
        rest = "".join(f", {key.removesuffix('_size')} {one[key]}".removesuffix(".0") for key in varied)
        name = tables.data_name(one)
        room = max(8, LETTERS - len(rest))
        labels.append((name if len(name) <= room else f"{name[: room - 1]}…") + rest)
    return labels


def _last(path: str) -> str:
    return Path(path).name
