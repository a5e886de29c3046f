"""Rows of JSONL files that users bring, prompts and chats alike: reading them, and the faults that they may have."""

import json
from typing import Any

from dflash_jax.errors import UserError, check

BOM = b"\xef\xbb\xbf"
ROLES = ("system", "user", "assistant", "tool")


def utf8(content: bytes, where: str) -> str:
    """Read bytes as text.

    Raises:
        UserError: they are none in UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not valid UTF-8 text (byte {error.start + 1})") from error


def lines(content: bytes, where: str) -> list[str]:
    """Return the lines of a file, without the marks of byte order that some have; files put together have several.

    Raises:
        UserError: it is no text in UTF-8.
    """
    return [line.removeprefix("\ufeff") for line in utf8(content, where).split("\n")]


def read_row(line: str, where: str, right: str) -> dict[str, Any]:
    """Read a row; `right` shows what rows look like.

    Raises:
        UserError: no JSON object.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); a row {right} is right") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: {spoken(row)}; a row {right} is right")
    return row


def check_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return what a row has for `messages`, if they are the messages of a chat.

    Raises:
        UserError: they are not, or one has no role that is known, or no text.
    """
    for name, message in each(value, where, "messages", '{"role": …, "content": …}'):
        role, content = message.get("role"), message.get("content")
        # Some templates pass over roles that they do not know, without a word.
        check(role in ROLES, f"{name}: role is {spoken(role)}; {', '.join(ROLES)} are known")
        calls = role == "assistant" and bool(message.get("tool_calls"))
        check(isinstance(content, str) or calls, f"{name}: content is {spoken(content)}; a text is right")
    return list(value)


def each(value: Any, where: str, field: str, form: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects that a row has for `field`, each after its name; `form` shows what they look like.

    Raises:
        UserError: no list of objects, or an empty one.
    """
    check(
        isinstance(value, list) and bool(value),
        f"{where}: {field} is {spoken(value)}; a list of {form}, one or more, is right",
    )
    named = [(f"{where}: {field}[{i}]", message) for i, message in enumerate(value)]
    for name, message in named:
        check(isinstance(message, dict), f"{name} is {spoken(message)}; {form} is right")
    return named


def spoken(value: Any) -> str:
    """Say what a value is, where another was expected."""
    if value is None:
        return "missing or null"
    name = type(value).__name__
    return f"an empty {name}" if value in ([], {}, "") else f"the {name} {str(value)[:40]}"
