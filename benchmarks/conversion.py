"""Converting a synthetic checkpoint: time against an fsynced copy of its files, and anonymous memory.

`python -m benchmarks.conversion [--gib 4] [--directory DIR]`
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from convert import names
from convert.published import spell, write_published
from convert.weights import Arrays
from dflash_jax import presets
from dflash_jax.config import TargetConfig

MIB, GIB = 2**20, 2**30
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def main() -> None:
    """Write a checkpoint, copy it, convert it to Flax, and that back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint (default: 4)")
    parser.add_argument("--directory", default=None, help="where to write (default: the temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as base:
        source, flax = Path(base) / "source", Path(base) / "flax"
        write_synthetic(source, args.gib * GIB)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{size / GIB:.2f} GiB, {len(list(source.glob('*.safetensors')))} files\n")
        print("| | seconds | MiB/s | a copy, fsynced, MiB/s | ratio | anonymous MiB |")
        print("|---|---|---|---|---|---|")
        for command, one, other in (("to-flax", source, flax), ("to-hf", flax, Path(base) / "back")):
            # Each beside a copy of its own: what a disk takes changes by the minute.
            copied = timed(lambda: copy(source, Path(base) / "copy"))
            shutil.rmtree(Path(base) / "copy")
            took, memory = convert(command, one, other)
            speeds = f"{size / MIB / took:.0f} | {size / MIB / copied:.0f} | {copied / took:.2f}"
            print(f"| {command} | {took:.1f} | {speeds} | {memory / MIB:.0f} |", flush=True)


def write_synthetic(directory: Path, size: float) -> None:
    """Write a Qwen3 of 4B's widths, bfloat16, with as many layers as the size takes."""
    whole = presets.TARGETS["qwen3-4b"].to_hf()
    shapes = names.shapes(TargetConfig.from_hf(whole | {"num_hidden_layers": 1, "layer_types": None}))
    layer = 2 * sum(int(np.prod(shape)) for path, shape in shapes.items() if path.startswith("layers_"))
    rest = 2 * sum(int(np.prod(shape)) for path, shape in shapes.items() if not path.startswith("layers_"))
    layers = max(1, -int((rest - size) // layer))
    config = TargetConfig.from_hf(whole | {"num_hidden_layers": layers, "layer_types": None})
    noise = np.random.default_rng(0).integers(0, 2**16, 2**24, np.uint16)

    def arrays() -> Arrays:
        for path, shape in names.shapes(config).items():
            yield path, np.resize(noise, shape).view(BFLOAT16)

    directory.mkdir()
    dtypes = dict.fromkeys(names.shapes(config), BFLOAT16)
    write_published(directory, spell(config, dtypes), config, dtypes, arrays(), 10**9)
    os.sync()


def copy(source: Path, destination: Path) -> None:
    """Copy every file, and wait until it is on the disk."""
    destination.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, destination / file.name)
        with (destination / file.name).open("rb") as opened:
            os.fsync(opened.fileno())


def timed(action: Callable[[], None]) -> float:
    """Return the seconds that something takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def convert(command: str, source: Path, destination: Path) -> tuple[float, float]:
    """Convert in a process of its own; return the seconds, and the most anonymous memory that it had at once."""
    start = time.perf_counter()
    arguments = [sys.executable, "-m", "convert", command, str(source), str(destination)]
    running = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while running.poll() is None:
        most = max(most, anonymous(running.pid))
        time.sleep(0.01)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, arguments)
    return time.perf_counter() - start, most


def anonymous(process: int) -> int:
    """Return the bytes of anonymous memory that a process has now; Linux alone tells."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    told = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(told[0]) * 1024 if told else 0


if __name__ == "__main__":
    main()
