"""Tokenizers that lie in a directory as files."""

import os
from pathlib import Path
from typing import Any

from convert.files import read_json
from dflash_jax.errors import UserError, check

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
NAMES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    *TEMPLATES,
)


def load(directory: Path) -> Any:
    """Load `tokenizer.json` as it is, with its special tokens and chat template; no code from the directory runs.

    Raises:
        UserError: no tokenizer there, or one that cannot be read.
    """
    check(
        (directory / TOKENIZER).is_file(),
        f"{directory}: no {TOKENIZER} in it; token ids can be decoded without one, text needs it beside the weights",
    )
    if (directory / SETTINGS).is_file():
        read_json(directory / SETTINGS)
    try:
        return tokenizer_class().from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise UserError(f"{directory / TOKENIZER}: not a readable tokenizer ({error})") from error


def tokenizer_class() -> Any:
    """Return transformers' tokenizer over a `tokenizers` one; its automatic class imports torch where that is."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses torch, and says so
    from transformers import PreTrainedTokenizerFast  # slow to import, and token ids alone need none

    return PreTrainedTokenizerFast


def has_chat_template(directory: Path) -> bool:
    """Say whether there is a chat template, of its own or in the tokenizer's settings."""
    if any((directory / name).is_file() for name in TEMPLATES):
        return True
    settings = directory / SETTINGS
    return settings.is_file() and bool(read_json(settings).get("chat_template"))
