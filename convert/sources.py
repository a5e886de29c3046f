"""From what a user writes after `--ckpt` to the reader of that format."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from convert import hub, weights
from convert.files import about
from convert.flax_checkpoint import MANIFEST, PARAMS, FlaxSource
from convert.gguf_file import GgufSource
from convert.huggingface import HuggingFaceSource
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError, check

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@runtime_checkable
class Source(Protocol):
    """A checkpoint of any format, whose header and config have been read."""

    format: str
    path: Path
    config_name: str
    hf_config: dict[str, Any]

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse tensors that are not those of the config."""

    def stored_names(self, config: TargetConfig | DraftConfig) -> dict[str, set[str]]:
        """Return the names of the dtypes in which each parameter is stored."""

    def stored_dtypes(self, config: TargetConfig | DraftConfig) -> dict[str, np.dtype]:
        """Return the dtype that each parameter has."""

    def arrays(self, config: TargetConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> weights.Arrays:
        """Yield every parameter, one at a time, each of the dtype that is given for it."""

    def companions(self) -> list[Path]:
        """Return the files of a tokenizer and a generation config."""

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the stops that stand elsewhere than in the config."""

    def tokenizer(self) -> Any:
        """Load the tokenizer."""

    def has_chat_template(self) -> bool:
        """Say whether there is a chat template."""

    def files(self) -> list[Path]:
        """Return the files that make up the checkpoint."""

    def save_companions(self, directory: Path) -> None:
        """Put the tokenizer's files and the generation config into a directory."""


def check_outside(source: Source, destination: Path) -> None:
    """Refuse to write into a Flax checkpoint that is being read: every file in it is part of it."""
    inside = isinstance(source, FlaxSource) and destination.resolve().is_relative_to(source.path.resolve())
    check(not inside, f"{destination}: lies in the Flax checkpoint that is read; a path outside it is right")


def is_hub_id(name: str) -> bool:
    """Say whether a name means a hub model: it looks like one, and no such path is there."""
    return not os.path.lexists(name) and bool(HUB_ID.fullmatch(name)) and Path(name).suffix != ".gguf"


def open_source(name: str) -> Source:
    """Open a checkpoint by its path or hub id, and read its headers.

    Raises:
        UserError: nothing there, or nothing that is a checkpoint.
    """
    path = hub.fetch(name) if is_hub_id(name) else Path(name)
    with about(name):  # a name that is too long, a directory that may not be entered
        check(path.exists(), "no such file or directory, and not a hub id (owner/name)")
        is_directory = path.is_dir()
        # What `to-hf` writes has a manifest, too.
        unfinished = is_directory and (path / MANIFEST).exists() and not any(path.glob("*.safetensors"))
        is_ours = unfinished or (is_directory and (path / PARAMS).is_dir())
    if is_directory:
        return FlaxSource(path) if is_ours else HuggingFaceSource(path)
    if path.suffix == ".gguf":
        return GgufSource(path)
    if path.suffix == ".safetensors":
        raise UserError(f"{name}: weights alone; the directory that holds them and config.json is right")
    raise UserError(f"{name}: not a checkpoint; a directory or a .gguf file is right")
