"""From a checkpoint of any format to a Flax checkpoint of ours."""

from pathlib import Path
from typing import Any

from convert import flax_checkpoint
from convert.conversion import converting
from convert.gguf_file import GgufSource
from convert.progress import Watch, quiet


def to_flax(
    source_name: str, destination: Path, dtype: str | None = None, *, verify: bool = False, watch: Watch = quiet
) -> dict[str, Any]:
    """Write a Flax checkpoint, which appears whole or not at all, and return its manifest.

    Memory holds a few tensors at a time, never the model.

    Args:
        source_name: path or hub id of a target or a draft.
        destination: a directory that is not there yet.
        dtype: "float32" or "bfloat16"; None keeps what is stored.
        verify: read what was written once more, and compare it with the source.
        watch: follows the tensors and files as they come, for a display of progress.

    Raises:
        UserError: as for `load_target`, a destination that is there already, or no room for it.
    """
    with converting(source_name, destination, dtype, watch) as conversion:
        source, config = conversion.source, conversion.config
        hf_config = config.to_hf() if isinstance(source, GgufSource) else source.hf_config
        flax_checkpoint.write(conversion.directory, config, conversion.dtypes, conversion.arrays(), hf_config)
        return conversion.finish(verify=verify)
