"""Targets, drafts and tokenizers from checkpoints of every format."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from convert import hub, speculators, weights
from convert.files import about, about_values, read_json
from convert.huggingface import HuggingFaceSource
from convert.progress import Watch, quiet
from convert.sources import Source, is_hub_id, open_source
from convert.trees import nest
from dflash_jax.config import DraftConfig, TargetConfig, is_draft
from dflash_jax.errors import UserError
from dflash_jax.parameters import Params


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target in memory. `stop_token_ids` are the config's and the generation config's together."""

    config: TargetConfig
    params: Params
    stop_token_ids: tuple[int, ...]
    source: str


@dataclasses.dataclass(frozen=True)
class LoadedDraft:
    """A draft in memory."""

    config: DraftConfig
    params: Params
    source: str


def load_target(
    path: str, dtype: str | None = None, *, place: weights.Place = weights.place, watch: Watch = quiet
) -> LoadedTarget:
    """Load a target from a Flax checkpoint, a Hugging Face directory, a .gguf file or a hub id.

    Args:
        path: where it is, or its hub id.
        dtype: "float32", "bfloat16" or, with JAX's 64-bit mode, "float64"; None keeps what is stored.
        place: puts each tensor where it belongs.
        watch: follows the tensors as they come, for a display of progress.

    Raises:
        UserError: nothing there, or nothing that is a whole target that we support.

    Example:
        >>> target = load_target("Qwen/Qwen3-4B", "bfloat16")
    """
    wanted = weights.asked_dtype(dtype)
    source = open_source(path)
    config = target_config(source)
    params = read_params(source, config, wanted, place=place, watch=watch)
    return LoadedTarget(config, params, stop_token_ids(source, config), path)


def load_draft(
    path: str, dtype: str | None = None, *, place: weights.Place = weights.place, watch: Watch = quiet
) -> LoadedDraft:
    """Load a draft from a Flax checkpoint, a directory in the published layout or a hub id.

    Arguments, errors and use are those of `load_target`.
    """
    wanted = weights.asked_dtype(dtype)
    source = open_source(path)
    config = draft_config(source)
    return LoadedDraft(config, read_params(source, config, wanted, place=place, watch=watch), path)


def load_tokenizer(path: str) -> Any:
    """Load the transformers tokenizer, with its chat template, of a checkpoint of any format.

    Raises:
        UserError: no checkpoint there, no tokenizer in it, or one that is not supported.
    """
    return open_source(path).tokenizer()


def target_config(source: Source) -> TargetConfig:
    """Read a source's config as a target's."""
    with about_values(source.config_name):
        return TargetConfig.from_hf(source.hf_config)


def target_config_of(name: str) -> TargetConfig:
    """Read a target's config by its path or hub id; of a hub model nothing else is fetched.

    Raises:
        UserError: nothing there, or no target.
    """
    if not is_hub_id(name):
        return target_config(open_source(name))
    file = hub.fetch(name, ["config.json"]) / "config.json"
    with about_values(file):
        return TargetConfig.from_hf(read_json(file))


def draft_config(source: Source) -> DraftConfig:
    """Read a source's config as a draft's."""
    if not isinstance(source, HuggingFaceSource):
        raise UserError(f"{source.path}: a .gguf file holds a target; a draft's directory is right")
    theirs = speculators.is_speculators(source.hf_config)
    held = [path for path in ("embedding", "head") if theirs and source.holds(path)]
    with about_values(source.config_name):
        if theirs:
            return speculators.read_config(source.hf_config, held)
        return DraftConfig.from_hf(source.hf_config)


def any_config(source: Source) -> TargetConfig | DraftConfig:
    """Read a source's config as that of the kind it is."""
    with about_values(source.config_name):
        draft = is_draft(source.hf_config)
    return draft_config(source) if draft else target_config(source)


def stop_token_ids(source: Source, config: TargetConfig) -> tuple[int, ...]:
    """Return the stops of the config and those beside it, each once."""
    return tuple(dict.fromkeys((*config.stop_token_ids, *source.stop_token_ids())))


def read_params(
    source: Source, config: TargetConfig | DraftConfig, dtype: np.dtype | None, *, place: weights.Place, watch: Watch
) -> Params:
    """Read every parameter, one at a time, and put each where it belongs.

    Raises:
        UserError: tensors that are missing, unexpected, mis-shaped or unreadable.
    """
    source.check(config)
    dtypes = dtypes_of(source, config, dtype)
    arrays: Iterable[tuple[str, np.ndarray]] = watch(
        source.arrays(config, dtypes), len(dtypes), f"reading {source.path.name}"
    )
    return nest(_placed(arrays, place))


def _placed(arrays: Iterable[tuple[str, np.ndarray]], place: weights.Place) -> Iterator[tuple[str, jax.Array]]:
    for path, array in arrays:
        placed = place(tuple(path.split("/")), array)
        del array  # the next one is read while this loop would hold it
        yield path, placed


def dtypes_of(source: Source, config: TargetConfig | DraftConfig, dtype: np.dtype | None) -> dict[str, np.dtype]:
    """Return the dtype that each parameter gets."""
    with about(source.path):
        return weights.dtypes(source.stored_dtypes(config), dtype)
