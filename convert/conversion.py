"""What converting in either direction has in common: what is read, what is told of it, and a look at what was made."""

import contextlib
import dataclasses
import filecmp
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convert import weights
from convert.files import new_directory, sha256, write_json
from convert.flax_checkpoint import FORMAT_VERSION, MANIFEST
from convert.inspection import summary
from convert.load import any_config, dtypes_of
from convert.progress import Watch
from convert.sources import Source, check_outside, open_source
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError, check, memory_named

OTHERWISE = "is not what was read; a disk that keeps what it gets is right"
TOO_LARGE = "one of its tensors is larger than the memory that there is; a machine with more is right"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A checkpoint on its way into a new directory. `dtypes` are the dtypes that its parameters get."""

    name: str
    source: Source
    config: TargetConfig | DraftConfig
    dtypes: dict[str, np.dtype]
    directory: Path
    watch: Watch

    def arrays(self) -> weights.Arrays:
        """Read every parameter, one at a time."""
        arrays = self.source.arrays(self.config, self.dtypes)
        yield from self.watch(arrays, len(self.dtypes), f"converting {self.source.path.name}")

    def finish(self, *, verify: bool) -> dict[str, Any]:
        """Write the manifest, which says that all is there, and return it; read what was written once more if asked.

        Raises:
            UserError: what was written is not what was read.
        """
        files = self.source.files()
        root = self.source.path if self.source.path.is_dir() else self.source.path.parent
        hashed = self.watch(files, len(files), f"hashing {self.source.path.name}")
        hashes = {str(file.relative_to(root)): sha256(file) for file in hashed}
        source = {"name": self.name, "format": self.source.format, "files": hashes}
        manifest = {"format_version": FORMAT_VERSION, **summary(self.config, self.dtypes), "source": source}
        write_json(self.directory / MANIFEST, manifest)
        if verify:
            self._verify()
        return manifest

    def _verify(self) -> None:
        made = open_source(str(self.directory))
        check(any_config(made) == self.config, f"--verify: the config of {made.format} means something else")
        made.check(self.config)
        stored = made.stored_dtypes(self.config)
        ours, theirs = made.arrays(self.config, stored), self.source.arrays(self.config, self.dtypes)
        # Not `zip`, which would hold both tensors while the next are read.
        for path in self.watch(self.dtypes, len(self.dtypes), "verifying"):
            check(_same(next(ours)[1], next(theirs)[1]), f"--verify: {path} {OTHERWISE}")
        for file in self.source.companions():
            check(filecmp.cmp(file, self.directory / file.name, shallow=False), f"--verify: {file.name} {OTHERWISE}")


@contextlib.contextmanager
def converting(name: str, destination: Path, dtype: str | None, watch: Watch) -> Iterator[Conversion]:
    """Open a checkpoint, and give a directory that appears as `destination` when all went well.

    What lies beside the weights, the tokenizer and the generation config, is there already.

    Raises:
        UserError: as for `load_target`, a destination that is there already, or no room for it.
    """
    wanted = weights.asked_dtype(dtype)
    with memory_named(f"{name}: {TOO_LARGE}"), new_directory(destination) as directory:
        source = open_source(name)
        check_outside(source, destination)
        config = any_config(source)
        source.check(config)
        if isinstance(config, TargetConfig):
            source.stop_token_ids()  # of a generation config that will be read with it
        source.save_companions(directory)
        yield Conversion(name, source, config, dtypes_of(source, config, wanted), directory, watch)


def read_size(text: str) -> int:
    """Read a number of bytes, as in 5GB or 500MiB.

    Raises:
        UserError: anything else.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?)\s?([A-Za-z]+)", text)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not float(found[1]):
        raise UserError(f"--max-shard-size {text}: not a size; a number and KB, MB or GB, as in 5GB, is right")
    return int(float(found[1]) * unit)


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    blocks = weights.row_blocks(ours.shape)
    return all(np.array_equal(_bits(ours[block]), _bits(theirs[block])) for block in blocks)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
