"""What a run would take on a machine that is not there: its step is compiled for it, and nothing is run.

Compiling needs another platform than this process may have begun with, so it happens in processes of their own
(`training/compile_elsewhere.py`), one for each mesh.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh

from convert import names
from convert.demo_target import find_demo_target
from convert.load import target_config_of
from convert.progress import tell
from convert.weights import DTYPES
from dflash_jax import sharding
from dflash_jax.config import TargetConfig
from dflash_jax.errors import UserError, check
from dflash_jax.presets import TARGETS
from training import compatible, machines
from training.config import MeshConfig, RunConfig
from training.initial import draft_config
from training.machines import GIB, Chip, Machine
from training.presets import PRESETS

# Meshes that are tried where none is asked for; each takes minutes.
MOST_MESHES = 4
NEEDED = {machines.TPU: ("libtpu",), machines.GPU: ("jax_cuda12_plugin", "jax_plugins.xla_cuda12")}
KINDS = ("target", "draft", "moments", "rows", "temporaries", "program")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh, and what the compiler says of the step on it."""

    machine: Machine
    mesh: MeshConfig
    rows: int
    tokens: int
    found: dict[str, Any]

    @property
    def needed(self) -> int | None:
        """Bytes a chip; None where the compiler refused without saying."""
        return None if self.found["needed_bytes"] is None else int(self.found["needed_bytes"])

    @property
    def fits(self) -> bool:
        """Whether a chip has room for the step."""
        room = self.machine.chip.usable_bytes
        return "refused" not in self.found and self.needed is not None and self.needed <= room

    @property
    def seconds(self) -> float | None:
        """The compiler's estimate, which counts a loop's body once, scaled by the products that it left out."""
        counted, seconds = self.found.get("compiler_flops"), self.found.get("compiler_seconds")
        return seconds * max(self.found["flops_per_chip"] / counted, 1) if counted and seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of rows, what fills them up included."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def share_of_peak(self) -> float | None:
        """What the step's products would be of the chip's peak."""
        return self.found["flops_per_chip"] / (self.seconds * self.machine.chip.peak_flops) if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "machine": self.machine.name,
            "chips": self.machine.chips,
            "mesh": dataclasses.asdict(self.mesh),
            "fits": self.fits,
            "hbm_bytes_per_chip": self.machine.chip.memory_bytes,
            "usable_bytes_per_chip": self.machine.chip.usable_bytes,
            "needed_bytes_per_chip": self.needed,
            "bytes_per_chip": self.found["bytes_per_chip"],
            "flops_per_chip": self.found["flops_per_chip"],
            "estimated_step_seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "share_of_peak": self.share_of_peak,
            "exchanges": self.found.get("exchanges"),
            "compile_seconds": self.found.get("compile_seconds"),
        }


def make(config: RunConfig, asked: MeshConfig | None, name: str) -> list[Plan]:
    """Compile the step for a machine, on the mesh that is asked for or, until one fits, on those that suit it.

    Returns:
        The plans, first the one that fits, if any, then the others, from the one that needs least.

    Raises:
        UserError: an unknown machine, packages that are missing, a target that cannot be found or trained for
            with these settings, or no mesh that divides rows and heads.
    """
    machine = machines.find(name)
    check_packages(machine)
    target = _target(config)
    sizes = (asked.data, asked.fsdp or 1, asked.tensor) if asked else (1, 1, 1)
    check(
        asked is None or math.prod(sizes) == machine.chips,
        f"--mesh.data, --mesh.fsdp, --mesh.tensor: {math.prod(sizes)} together, and {machine.name} has "
        f"{machine.chips} chips; sizes that make {machine.chips} are right",
    )
    compatible.check_run(config, target, AbstractMesh(sizes, sharding.AXES))
    meshes = [asked] if asked else list(candidates(config, target, machine))[:MOST_MESHES]
    check(
        bool(meshes),
        f"--train.batch-size: {config.train.batch_size} rows suit no mesh of {machine.chips} chips with up to "
        f"{target.num_kv_heads} of them for the heads; a multiple of {machine.chips} does",
    )
    plans: list[Plan] = []
    refused: UserError | None = None
    for mesh in meshes:
        tell(f"compiling for {machine.name}, {spell(mesh)}")
        try:
            plans.append(_compiled(config, target, machine, mesh))
        except UserError as error:
            refused = error
            tell(str(error))
            continue
        if plans[-1].fits:
            break
    if not plans and refused is not None:
        raise refused
    return sorted(plans, key=lambda plan: (not plan.fits, plan.needed or sys.maxsize))


def candidates(config: RunConfig, target: TargetConfig, machine: Machine) -> Iterator[MeshConfig]:
    """Yield meshes of all chips, those first that exchange least.

    With few chips for heads and MLP widths, and where the models take less than half of a chip, whole in each group.
    """
    roomy = _held_whole(config, target) < machine.chip.usable_bytes // 2
    for tensor in (2**i for i in range(machine.chips.bit_length())):
        groups, left = divmod(machine.chips, tensor)
        if left or target.num_kv_heads % tensor or config.train.batch_size % groups:
            continue
        if (config.loss.vocabulary or 0) % tensor:
            continue
        for data in dict.fromkeys((groups, 1, 2) if roomy else (1, 2)):
            if groups % data == 0 and target.hidden_size % (groups // data) == 0:
                yield MeshConfig(data=data, fsdp=groups // data, tensor=tensor)


def check_packages(machine: Machine, flag: str = "--plan") -> None:
    """Refuse a machine, named by a flag, for which the compiler is not installed.

    Raises:
        UserError: saying how to install it.
    """
    version = importlib.metadata.version("jaxlib")
    remedy = {
        machines.TPU: "`pip install 'jax[tpu]'`, on x86-64 Linux,",
        machines.GPU: f"`pip install --no-deps jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version} "
        "nvidia-cuda-nvcc-cu12`",
    }[machine.chip.platform]
    missing = [package for package in NEEDED[machine.chip.platform] if not _is_there(package)]
    check(not missing, f"{flag} {machine.name}: compiling for it takes {', '.join(missing)}; {remedy} is right")


def spell(mesh: MeshConfig) -> str:
    """Spell a mesh as flags."""
    return f"--mesh.data {mesh.data} --mesh.fsdp {mesh.fsdp} --mesh.tensor {mesh.tensor}"


def text(plans: list[Plan]) -> str:
    """Return plans as a table, the best first, and what to do."""
    best = plans[0]
    chip = best.machine.chip
    lines = [
        f"{best.machine.name}: {best.machine.chips} chips of {chip.memory_bytes / GIB:.1f} GiB{_usable(chip)}; "
        f"a step of {best.rows} rows, {best.tokens:,} tokens",
        "",
        f"{'data':>5}{'fsdp':>6}{'tensor':>8}   {'GiB a chip':<12}" + "".join(f"{kind:>13}" for kind in KINDS),
    ]
    for plan in plans:
        kinds = plan.found["bytes_per_chip"]
        needed = "no room" if plan.needed is None else f"{plan.needed / GIB:.2f}"
        shown = "".join(f"{kinds[kind] / GIB:>13.2f}" if kind in kinds else f"{'':>13}" for kind in KINDS)
        fits = "fits" if plan.fits else "too much"
        lines.append(f"{plan.mesh.data:>5}{plan.mesh.fsdp:>6}{plan.mesh.tensor:>8}   {needed:<12}{shown}   {fits}")
    lines += ["", f"{spell(best.mesh)}:"] + [f"  {line}" for line in _details(best)]
    return "\n".join(lines)


def _usable(chip: Chip) -> str:
    if chip.usable_bytes == chip.memory_bytes:
        return ""
    return f", of which jax takes {chip.usable_bytes / GIB:.1f} unless {machines.SHARE_VARIABLE} says otherwise"


def _details(plan: Plan) -> Iterator[str]:
    yield f"products      {plan.found['flops_per_chip'] / 1e12:,.1f} TFLOP a chip and step"
    if plan.seconds is not None and plan.share_of_peak is not None:
        yield (
            f"estimate      {plan.seconds:.3f} s a step, {plan.tokens_per_second:,.0f} tokens/s, "
            f"{plan.share_of_peak:.0%} of the peak (the compiler's, scaled up by the products that loops repeat)"
        )
    else:
        yield "estimate      none: the compiler for this machine gives no cost"
    for kind, one in sorted((plan.found.get("exchanges") or {}).items()):
        yield f"{kind:<13} {one['count']} in the program, {one['bytes'] / GIB:.2f} GiB a chip, what loops repeat once"
    if not plan.fits:
        yield "no room       more chips, shorter rows (--train.length), fewer --train.anchors, or --train.remat"


def _target(config: RunConfig) -> TargetConfig:
    """Return the target's config, without a hub for the published ones that presets name."""
    preset = PRESETS.get(config.preset)
    if preset is not None and config.preset in TARGETS and config.target == preset.target:
        return TARGETS[config.preset]
    return target_config_of(config.target or str(find_demo_target("--target")))


def _held_whole(config: RunConfig, target: TargetConfig) -> int:
    """Return the bytes of target, draft and moments where nothing splits them."""
    parameters, trained = (
        sum(math.prod(shape) for shape in names.shapes(model).values())
        for model in (target, draft_config(config, target))
    )
    return parameters * DTYPES[config.train.dtype].itemsize + trained * 3 * 4


def _compiled(config: RunConfig, target: TargetConfig, machine: Machine, mesh: MeshConfig) -> Plan:
    asked = {
        "config": dataclasses.asdict(dataclasses.replace(config, mesh=mesh)),
        "target": target.to_hf(),
        "machine": machine.name,
        "mesh": dataclasses.asdict(mesh),
    }
    quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "training.compile_elsewhere"]
    done = subprocess.run(
        command, input=json.dumps(asked), env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no reason told"]
        raise UserError(f"--plan {machine.name}: {spell(mesh)} cannot be compiled ({reason[0].strip()[:300]})")
    rows = config.train.batch_size
    return Plan(machine, mesh, rows, rows * config.train.length, json.loads(done.stdout))


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
