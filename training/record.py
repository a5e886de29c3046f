"""What a run's output says of how it was made, so that it goes on as the same run or not at all."""

import contextlib
import dataclasses
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from convert.files import about, locked, new_file, read_json, write_json
from convert.sources import Source
from dflash_jax.errors import check
from training.config import RunConfig
from training.prepared import Prepared, tokenizer_hash

CONFIG, LOCK = "config.json", ".lock"
PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Where things lie and how often they are kept; none of it changes a bit of the draft.
MAY_DIFFER = {
    "settings.preset",
    "settings.target",
    "settings.train.log_every",
    "settings.evaluation.every",
    "settings.features.cache",
    *(f"settings.checkpoint.{field}" for field in ("every", "keep")),
    "settings.export.dtype",
}


@contextlib.contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Make a run's output, and keep other runs from it.

    Raises:
        UserError: another run is in it, it holds something else, or it cannot be made.
    """
    with about(f"--output {output}"):
        if output.is_dir() and any(output.iterdir()):
            ours = (output / CONFIG).is_file() or (output / LOCK).is_file()
            check(ours, "holds something else than a run; another name is right")
        output.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(output / LOCK))
            held = stack.pop_all()
    with held:
        yield


def write_or_compare(output: Path, config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Write what a run is made of, or see whether it is what the run in this output was made of.

    Args:
        output: the run's.
        config: its settings.
        facts: digests of its target and data, and its draft's config.

    Raises:
        UserError: something differs, named by its field.
    """
    wanted = {"settings": dataclasses.asdict(config), **facts}
    file = output / CONFIG
    if not file.exists():
        made_with = {"versions": versions(), "device": jax.devices()[0].device_kind}
        with about(file), new_file(file) as partial:
            write_json(partial, wanted | made_with)
        return
    theirs, ours = dict(_flat("", read_json(file))), dict(_flat("", wanted))
    for name, value in ours.items():
        check(
            name in MAY_DIFFER or theirs.get(name) == value,
            f"--output {output}: {name.removeprefix('settings.')} is {theirs.get(name)!r} in its {CONFIG} and "
            f"{value!r} here; the same, or another output, is right",
        )


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def check_tokenizer(prepared: Prepared, source: Source) -> None:
    """Refuse data that was prepared for another tokenizer.

    Raises:
        UserError: naming the data.
    """
    check(
        tokenizer_hash(source.tokenizer()) == prepared.tokenizer_hash,
        f"--data {prepared.path}: prepared with the tokenizer of {prepared.manifest['target']}, which is not that of "
        f"{os.fspath(source.path)}; preparing it for this target is right",
    )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested objects by its dotted name."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
