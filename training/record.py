"""What a run's output says of how it was made, so that it goes on as the same run or not at all."""

import contextlib
import dataclasses
import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from convert.files import about, locked, new_file, read_json, write_json
from dflash_jax.errors import UserError, check
from training import together
from training.config import RunConfig

CONFIG, LOCK, PARTIAL = "config.json", ".lock", ".*.partial"
PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Where things lie and how often they are kept; none of it changes the draft, but another mesh, or rematerialisation,
# rounds otherwise.
MAY_DIFFER = {
    "settings.preset",
    "settings.target",
    "settings.train.log_every",
    "settings.train.remat",
    "settings.evaluation.every",
    "settings.features.cache",
    *(f"settings.checkpoint.{field}" for field in ("every", "keep")),
    "settings.export.dtype",
    *(f"settings.mesh.{axis}" for axis in ("data", "fsdp", "tensor")),
}


@contextlib.contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Make a run's output, and keep other runs from it.

    Raises:
        UserError: another run is in it, it holds something else, or it cannot be made.
    """
    with about(f"--output {output}"):
        check(not os.path.lexists(output) or output.is_dir(), "no directory; one, or a new name, is right")
        check(_may_be_run(output), "holds something else than a run; another name is right")
        with contextlib.ExitStack() as stack:
            try:
                output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(output / LOCK))
            except OSError as error:
                raise UserError(f"cannot be written ({error.strerror}); a place that can be is right") from error
            held = stack.pop_all()
    with held:
        _sweep(output)
        yield


def _may_be_run(output: Path) -> bool:
    """Say whether a directory is a run's, or one that a run just began with. Models have a config.json, too."""
    if not output.is_dir():
        return True
    if (output / CONFIG).exists():
        return "settings" in read_json(output / CONFIG)
    return all(file.name == LOCK or file.match(PARTIAL) for file in output.iterdir())


def _sweep(output: Path) -> None:
    """Remove what a run that was killed had not written whole."""
    for left in output.glob(PARTIAL):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def write_or_compare(output: Path, config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Write what a run is made of, or see whether it is what the run in this output was made of.

    Args:
        output: the run's.
        config: its settings.
        facts: digests of its target and data, and its draft's config.

    Raises:
        UserError: something differs, every field of it named.
    """
    wanted = {"settings": dataclasses.asdict(config), **facts}
    file = output / CONFIG
    if not file.exists():
        made_with = {"versions": versions(), "device": jax.devices()[0].device_kind}
        with new_file(file) as partial:
            write_json(partial, wanted | made_with)
        return
    theirs, ours = dict(_flat("", read_json(file))), dict(_flat("", wanted))
    differing = [name for name, value in ours.items() if name not in MAY_DIFFER and theirs.get(name) != value]
    # What follows from settings differs with them.
    told = [name for name in differing if name.startswith("settings.")] or differing
    found = ", ".join(
        f"{name.removeprefix('settings.')} is {theirs.get(name)!r} there and {ours[name]!r} here" for name in told
    )
    check(
        not told,
        f"--output {output}: not the run that its {CONFIG} tells of: {found}; the same, or another output, is right",
    )


def check_alike(output: Path, config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Refuse a process that is not about to do what the first one does, or does not see what that one writes.

    Raises:
        UserError: in the process that differs.
    """
    together.check_same([settings(config), facts])
    together.wait_for(output / CONFIG, f"--output {output}")


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that all processes of a run must share; each host may have the target elsewhere."""
    return dataclasses.asdict(config) | {"target": None}


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested objects by its dotted name."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
