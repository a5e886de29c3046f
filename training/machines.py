"""Accelerators by their vendors' names: what a plan compiles for, and what it compares with."""

import dataclasses
import re

from dflash_jax.errors import UserError, check

GIB = 2**30
TPU, GPU = "tpu", "cuda"
SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. Its peak is that of dense bfloat16 products, a second."""

    platform: str
    memory_bytes: int
    peak_flops: float
    cores: int = 1  # that its vendor counts for one
    dimensions: int = 1  # of the torus that slices are parts of
    most: int = 8  # in a slice, or in a node

    @property
    def usable_bytes(self) -> int:
        """What jax takes of the memory; of a GPU's three quarters, unless `SHARE_VARIABLE` says otherwise."""
        return self.memory_bytes if self.platform == TPU else self.memory_bytes * 3 // 4


# Memory and peaks as the vendors publish them.
CHIPS = {
    "v5e": Chip(TPU, 16 * GIB, 197e12, dimensions=2, most=256),
    "v5p": Chip(TPU, 95 * GIB, 459e12, cores=2, dimensions=3, most=8960),
    "v6e": Chip(TPU, 32 * GIB, 918e12, dimensions=2, most=256),
    "h100": Chip(GPU, 84_978_434_048, 989e12),
    "h200": Chip(GPU, 141 * 10**9, 989e12),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """So many chips. `topology` is how a TPU slice of them is laid out, as in 2x4x4."""

    name: str
    chip: Chip
    chips: int

    @property
    def kind(self) -> str:
        """The chip's name."""
        return self.name.rpartition("-")[0]

    @property
    def topology(self) -> str:
        """Sides as equal as powers of two are, the longest last."""
        sides = [1] * self.chip.dimensions
        rest = self.chips
        while rest > 1:
            sides[sides.index(min(sides))] *= 2
            rest //= 2
        sides.sort(reverse=self.chips == 4)  # 2x2x1, and then 2x2x2, 2x2x4, …
        return "x".join(map(str, sides))


def find(name: str) -> Machine:
    """Return a machine by its vendor's name: v5e-16 and v6e-8 count chips, v5p-64 cores, h100-8 GPUs.

    Google Cloud says v5litepod for v5e, too.

    Raises:
        UserError: no such machine.
    """
    name = re.sub(r"^v5litepod-", "v5e-", name)
    named = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]{0,5})", name)
    if named is None or named[1] not in CHIPS:
        raise UserError(f"--plan: {name!r} is not known; one of {', '.join(f'{kind}-N' for kind in CHIPS)} is right")
    chip, count = CHIPS[named[1]], int(named[2])
    chips = count // chip.cores
    whole = count % chip.cores == 0 and chips & (chips - 1) == 0
    least = 4 if chip.dimensions == 3 else 1
    check(
        whole and least <= chips <= chip.most,
        f"--plan: {name}; {named[1]}-N with N a power of two from {least * chip.cores} to "
        f"{2 ** (chip.most.bit_length() - 1) * chip.cores} is right",
    )
    return Machine(name, chip, chips)
