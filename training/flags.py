"""A run's settings as command-line flags: one a field, named, typed and explained by the field."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from training.config import RunConfig, flag_of

NONE = "none"


def add_flags(parser: argparse.ArgumentParser, preset: RunConfig | None = None) -> None:
    """Add a flag for every field of `RunConfig`; those not given leave the preset's value, which help shows."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for section, field in _fields():
        group = groups.setdefault(section, parser.add_argument_group(f"--{section}.…" if section else "the run"))
        flag, about = flag_of(section, field.name), field.metadata["help"].replace("%", "%%")
        kind, optional = _kind(field)
        if preset is not None:
            value = getattr(getattr(preset, section) if section else preset, field.name)
            about += f" [{NONE if value is None else value}]"
        settings: dict[str, Any] = {"help": about, "dest": f"{section}.{field.name}", "default": argparse.SUPPRESS}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        else:
            group.add_argument(flag, type=_reader(kind, optional), metavar=_metavar(kind, optional), **settings)


def override(preset: RunConfig, given: argparse.Namespace) -> RunConfig:
    """Return the preset with the fields that were given.

    Raises:
        UserError: a value that cannot be.
    """
    values = vars(given)
    sections: dict[str, dict[str, Any]] = {}
    for section, field in _fields():
        if (name := f"{section}.{field.name}") in values:
            sections.setdefault(section, {})[field.name] = values[name]
    top = sections.pop("", {})
    top |= {name: dataclasses.replace(getattr(preset, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(preset, **top)


def _fields() -> Iterator[tuple[str, dataclasses.Field]]:
    """Yield every field that has a flag, with its section."""
    for field in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(field.type):
            yield from ((field.name, inner) for inner in dataclasses.fields(typing.cast("Any", field.type)))
        elif "help" in field.metadata:
            yield "", field


def _kind(field: dataclasses.Field) -> tuple[type, bool]:
    """Return a field's type, and whether it may be None."""
    if isinstance(field.type, types.UnionType):
        [kind] = [kind for kind in typing.get_args(field.type) if kind is not type(None)]
        return kind, True
    return typing.cast("type", field.type), False


def _reader(kind: type, optional: bool) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if optional and text == NONE:
            return None
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}; {_words(kind, optional)} is right") from error

    return read


def _words(kind: type, optional: bool) -> str:
    name = {int: "a whole number", float: "a number", str: "a text"}[kind]
    return f"{name} or {NONE}" if optional else name


def _metavar(kind: type, optional: bool) -> str:
    name = {int: "N", float: "X", str: "TEXT"}[kind]
    return f"{name}|{NONE}" if optional else name
