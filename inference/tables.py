"""Results of a benchmark as text: a table of all combinations, then what is to say of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from convert.cli import printable
from inference.questions import NAMED

HEADS = ("data", "temperature", "batch", "block", "plain tok/s", "DFlash tok/s", "speedup", "τ", "identical")
DIFFERENCES_TOLD = 5
NUMBERS_FROM = 1  # columns from here on are numbers


def show(results: Sequence[dict[str, Any]], out: TextIO) -> None:
    """Write the results: ruled on a terminal, in plain columns elsewhere."""
    rows = [row(result) for result in results]
    if out.isatty():
        table = Table()
        for i, head in enumerate(HEADS):
            table.add_column(head, justify="right" if i >= NUMBERS_FROM else "left", overflow="fold")
        for cells in rows:
            table.add_row(*cells)
        Console(file=out, markup=False, highlight=False).print(table)
    else:
        out.write("\n".join(_columns([HEADS, *rows])) + "\n")
    for result in results:
        out.write("\n" + "\n".join(_details(result)) + "\n")
    out.flush()


def data_name(result: dict[str, Any]) -> str:
    """Return what a result's data are called: the set's name, or the file's without its directories."""
    name, _, _ = result["data"].partition("=")
    shown = name if name in NAMED else Path(result["data"]).name
    return printable(shown)


def name(result: dict[str, Any]) -> str:
    """Return what a combination is called."""
    return (
        f"{data_name(result)}, temperature {result['temperature']:g}, batch {result['batch_size']}, "
        f"block {result['block_size']}"
    )


def number(value: float | None, digits: int = 2) -> str:
    """Write a figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def sameness(result: dict[str, Any]) -> str:
    """Say in how many prompts the tokens were identical, and where they were not."""
    line = f"tokens identical in {result['identical']} of {result['prompts']} prompts"
    differ = [
        f"{one['where']}, turn {one['turn']}, from token {one['first_difference'] + 1}"
        for one in result["per_prompt"]
        if not one["identical"]
    ]
    if differ:
        more = f" and {len(differ) - DIFFERENCES_TOLD} more" if differ[DIFFERENCES_TOLD:] else ""
        line += f"; different in {'; '.join(differ[:DIFFERENCES_TOLD])}{more}"
    if result["temperature"]:
        line += " (sampled answers may differ: rounding can tip a draw)"
    return line


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """Return a result's cells, in the order of `HEADS`."""
    return (
        data_name(result),
        f"{result['temperature']:g}",
        str(result["batch_size"]),
        str(result["block_size"]),
        number(result["baseline_tokens_per_second"], 1),
        number(result["dflash_tokens_per_second"], 1),
        number(result["speedup"]),
        number(result["acceptance_length"]),
        f"{result['identical']}/{result['prompts']}",
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEADS))]
    return [
        "  ".join(
            cell.rjust(width) if i >= NUMBERS_FROM else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    ]


def _details(result: dict[str, Any]) -> list[str]:
    blocks = sum(result["histogram"])
    lines = [f"{name(result)}:", f"  {sameness(result)}"]
    if blocks:
        shares = (f"{i}: {count / blocks:.1%}" for i, count in enumerate(result["histogram"], 1))
        lines.append(f"  blocks by tokens: {', '.join(shares)}")
        lines.append(
            f"  a block takes {1e3 * result['block_seconds']:.1f} ms, a plain token "
            f"{number(result['token_seconds'] and 1e3 * result['token_seconds'], 1)} ms: "
            f"a block costs {number(result['block_cost'])} tokens"
        )
    if result["by_slot"]:
        shares = (f"{i}: {'–' if share is None else f'{share:.1%}'}" for i, share in enumerate(result["by_slot"], 1))
        lines.append(f"  accepted up to slot: {', '.join(shares)}")
    if split := result["time_split"]:
        parts = ", ".join(f"{part.removesuffix('_seconds')} {seconds:.2f} s" for part, seconds in split.items())
        lines.append(f"  time with the draft: {parts} (shares of a block, estimated)")
    return lines
