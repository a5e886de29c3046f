"""Answers for people: text as it comes, in colours where a terminal shows them, and a line that sums up."""

import itertools
import os
from typing import Any, TextIO

from inference.engine import Generation
from inference.text import Detokenizer, spoken

# Told apart by colour-blind readers, on dark and light grounds.
DRAFTED, CHOSEN, RESET = "\x1b[36m", "\x1b[33m", "\x1b[0m"
LEGEND = f"{DRAFTED}accepted drafts{RESET}, {CHOSEN}tokens of the target{RESET}"
# An answer must not steer the terminal: control characters are shown as pictures of themselves.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def has_colours(out: TextIO) -> bool:
    """Say whether to write in colours: to a terminal that has them, unless NO_COLOR is set."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def summary(generation: Generation) -> str:
    """Sum up an answer in a line. One that its first token ended has no speed and no blocks."""
    count = len(generation.token_ids)
    parts = [f"{count} token{'s' * (count != 1)}"]
    if generation.tokens_per_second is not None:
        parts.append(f"{generation.tokens_per_second:.1f} tokens/s")
    if generation.acceptance_length is not None:
        parts.append(f"acceptance length {generation.acceptance_length:.2f}")
    parts += [
        f"finish reason {generation.finish_reason}",
        f"prefill {generation.prefill_seconds:.2f} s",
        f"decode {generation.decode_seconds:.2f} s",
    ]
    return ", ".join(parts)


class AnswerWriter:
    """Writes one answer as it grows; with colours, each token in that of where it came from."""

    def __init__(self, tokenizer: Any, out: TextIO, *, colours: bool) -> None:
        self._out = out
        self._detokenizer = Detokenizer(tokenizer)
        self._colours = colours
        self._written = 0

    def show(self, generation: Generation) -> None:
        """Write what is new in the answer, and end the line where the answer has ended."""
        tokens = spoken(generation)
        new = zip(generation.drafted[self._written :], tokens[self._written :], strict=False)
        for drafted, run in itertools.groupby(new, key=lambda item: item[0]):
            self._write(self._detokenizer.push([token for _, token in run]), drafted)
        self._written = len(tokens)
        if generation.finish_reason:
            self._write(self._detokenizer.finish(), drafted=False)
            self._out.write("\n")
        self._out.flush()

    def _write(self, text: str, drafted: bool) -> None:
        if self._out.isatty():
            text = text.translate(VISIBLE)
        if text and self._colours:
            text = f"{DRAFTED if drafted else CHOSEN}{text}{RESET}"
        self._out.write(text)
