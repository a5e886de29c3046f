"""What decoding would cost on machines that are not here: `python -m benchmarks.compiled`.

The programs of decoding are compiled for each machine, with the first 2 and the first 4 layers of the target, and what
the compiler says of them is carried on in a straight line to all layers; for one machine, all layers are compiled too.
Nothing is run. It takes the compilers that `python -m training.run PRESET --plan MACHINE` takes.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from convert import cli
from dflash_jax.errors import UserError
from dflash_jax.presets import TARGETS
from training import machines
from training.plan import check_packages

DEPTHS = (2, 4)
FROM_TARGET = ("token", "verify", "block", "prefill", "loop")
FROM_DRAFT = ("draft", "draft of one")
WHOLE = ("qwen3-8b", "v5p-8", ("token", "verify", "block", "loop"))
LENGTHS = (4, 5, 6, 7, 8)
# Qwen3-4B on v5p-8, blocks of 16, greedy: the mean of nine data sets, as published.
PUBLISHED = {("qwen3-4b", "v5p-8"): (5.42, 3.13)}
HEADER = "| program | MB | GFLOP | µs | temporaries, MB | exchanges |\n|---|---|---|---|---|---|"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the compiler says of a program, of one chip; no cost of loops, nor of programs for GPUs."""

    bytes: float | None
    flops: float | None
    seconds: float | None
    temporaries: float
    aliased: float
    caches: float
    exchanges: float

    @classmethod
    def at(cls, layers: int, found: dict[int, "Cost"]) -> "Cost":
        """Carry the costs with two numbers of layers on to another."""
        (fewer, less), (more, most) = sorted(found.items())

        def carried(start: float | None, end: float | None) -> float | None:
            if start is None or end is None:
                return None
            return start + (end - start) / (more - fewer) * (layers - fewer)

        return cls(*map(carried, dataclasses.astuple(less), dataclasses.astuple(most)))  # type: ignore[arg-type]

    def row(self, name: str) -> str:
        """Return a row of the table."""
        scaled = ((self.bytes, 1e6, 1), (self.flops, 1e9, 1), (self.seconds, 1e-6, 0), (self.temporaries, 1e6, 1))
        cells = ["" if value is None else f"{value / unit:,.{digits}f}" for value, unit, digits in scaled]
        return f"| {' | '.join([name, *cells, f'{self.exchanges:.0f}'])} |"


def main(argv: Sequence[str]) -> None:
    """Compile for every machine, and print a row of each program as it comes."""
    parser = cli.Parser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=("qwen3-4b", "qwen3-8b"), default=["qwen3-4b", "qwen3-8b"])
    known = ("v5e-4", "v5p-8", "v6e-8", "h100-1")
    parser.add_argument("--machines", nargs="+", choices=known, default=list(known))
    args = parser.parse_args(argv)
    for name in args.machines:
        check_packages(machines.find(name), "--machines")
    for name in args.machines:
        for target in args.targets:
            _report(target, machines.find(name))


def _report(target: str, machine: machines.Machine) -> None:
    layers = TARGETS[target].num_layers
    print(f"\n{target}, {machine.name}: of each of {machine.chips} chips\n\n{HEADER}", flush=True)
    asked = ["loop:2", "loop:4"]
    if machine.chip.platform == machines.TPU:
        asked = [f"{name}:{DEPTHS[0]}" for name in FROM_DRAFT]
        asked += [f"{name}:{depth}" for name in FROM_TARGET for depth in DEPTHS]
        asked += [f"{name}:{layers}" for name in WHOLE[2] if WHOLE[:2] == (target, machine.name)]
    costs: dict[str, Cost] = {}
    seen: dict[str, dict[int, Cost]] = {}
    for name, depth, cost in _compiled(target, machine.name, asked):
        if depth == layers:
            print(cost.row(f"{name}, all {layers} layers compiled"), flush=True)
            continue
        seen.setdefault(name, {})[depth] = cost
        if name in FROM_DRAFT:
            costs[name] = cost
        elif len(seen[name]) == len(DEPTHS):
            costs[name] = Cost.at(layers, seen[name])
        if name in costs:
            print(costs[name].row(name), flush=True)
    print()
    for line in summary(costs, PUBLISHED.get((target, machine.name))):
        print(line, flush=True)


def summary(costs: dict[str, Cost], published: tuple[float, float] | None) -> Iterator[str]:
    """Say what costs come to: ratios, and speedups by acceptance length."""
    loop = costs["loop"]
    yield (
        f"loop: temporaries {loop.temporaries / loop.caches:.1%} of the caches, {loop.caches / 1e6:,.1f} MB, of which "
        f"{min(loop.aliased / loop.caches, 1):.0%} stay in place"
    )
    seconds = {name: cost.seconds for name, cost in costs.items()}
    if seconds.get("token") is None:
        return
    times: Any = seconds
    yield f"verify / token {times['verify'] / times['token']:.2f}"
    yield f"draft / draft of one {times['draft'] / times['draft of one']:.2f}"
    block = times["block"] / times["token"]
    shown = ", ".join(f"{length / block:.2f} at {length}" for length in LENGTHS)
    yield f"a block costs {block:.2f} tokens; speedup by acceptance length {shown}"
    if published is not None:
        length, speedup = published
        yield f"published {speedup} at {length}: a block costs {length / speedup:.2f} tokens; here {length / block:.2f}"


def _compiled(target: str, machine: str, asked: Sequence[str]) -> Iterator[tuple[str, int, Cost]]:
    quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.compile_decoding", target, machine, *asked]
    # A file takes whatever the compilers say, where a pipe that nobody reads would fill up.
    with tempfile.TemporaryFile("w+") as said:
        told = {"stdout": subprocess.PIPE, "stderr": said}
        with subprocess.Popen(command, env=os.environ | quiet, text=True, **told) as process:  # type: ignore[call-overload]
            for line in process.stdout:
                found = json.loads(line)
                yield found.pop("program"), found.pop("layers"), Cost(**found)
        said.seek(0)
        reason = [line for line in said.read().splitlines() if line.strip()][-1:] or ["no reason told"]
    if process.returncode:
        raise UserError(f"--machines {machine}: {target} cannot be compiled ({reason[0].strip()[:300]})")


if __name__ == "__main__":
    cli.run(main)
