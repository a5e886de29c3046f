"""Token ids back to text, whole or as they come."""

from collections.abc import Sequence
from typing import Any

from inference.engine import Generation

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes of a character that are there while its last is not.
MAX_UNFINISHED = 3
# Tokens kept as context, so that the text of the next ones does not begin as a text begins; and when to drop the rest.
CONTEXT, WINDOW = 8, 32


def text_of(generation: Generation, tokenizer: Any) -> str:
    """Return an answer's text: all that was generated but the stop token that ended it.

    Special tokens other than that one are part of the text: nothing is left out for its value.
    """
    return _decode(tokenizer, spoken(generation))


def spoken(generation: Generation) -> list[int]:
    """Return an answer's tokens without the stop token that ended it."""
    return generation.token_ids[:-1] if generation.finish_reason == "stop" else generation.token_ids


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces together are the text of all the ids.

    A character whose bytes are not all there waits for them. Only the last few tokens are decoded again.

    Example:
        >>> detokenizer = Detokenizer(tokenizer)
        >>> detokenizer.push(ids[:3]) + detokenizer.push(ids[3:]) + detokenizer.finish() == tokenizer.decode(ids)
        True
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._told = 0  # characters of the window's text that were returned

    def push(self, ids: Sequence[int]) -> str:
        """Take more tokens, and return the text that is certain now."""
        self._window += ids
        text = _decode(self._tokenizer, self._window)
        # Replacements at the end stand for bytes that the next token may complete to a character.
        unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) > WINDOW:
            unfinished = min(unfinished, MAX_UNFINISHED)
        piece = self._tell(text, len(text) - unfinished)
        if len(self._window) > WINDOW:
            self._shorten(len(text) - self._told)
        return piece

    def finish(self) -> str:
        """Return what was held back: no token will come to finish it."""
        text = _decode(self._tokenizer, self._window)
        return self._tell(text, len(text))

    def _shorten(self, held: int) -> None:
        """Keep the last few tokens, from the beginning of a character on; `held` characters of them are untold."""
        for length in range(CONTEXT, CONTEXT + MAX_UNFINISHED + 1):
            text = _decode(self._tokenizer, self._window[-length:])
            if not text.startswith(REPLACEMENT):
                break
        self._window = self._window[-length:]
        self._told = max(0, len(text) - held)

    def _tell(self, text: str, end: int) -> str:
        piece = text[self._told : end]
        self._told = max(self._told, end)
        return piece


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    # Cleaning up spaces would change what was generated.
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
