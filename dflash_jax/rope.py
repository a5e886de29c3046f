"""Rotary position embeddings: settings, frequencies and rotation, always in float32 (law 13)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.errors import UserError, check

KINDS = ("default", "linear", "llama3", "yarn")
# Beyond these no frequency is left to compute with.
SMALLEST, LARGEST = 1e-6, 1e6


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary settings of one kind of layer, as transformers' `rope_parameters` spells them.

    `theta` is the base; `factor` and what follows it belong to the scaled kinds. `partial` is the leading share of
    each head that turns.
    """

    theta: float
    kind: str = "default"
    partial: float = 1.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: whole dimensions bound the ramp

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], layer_type: str) -> "Rotary":
        """Read the rotary settings that layers of `layer_type` have in a Hugging Face config.

        Both spellings are read: `rope_theta` beside `rope_scaling` (transformers 4), and `rope_parameters`
        (transformers 5), which may hold one dictionary a layer type.

        Raises:
            UserError: no base, an unknown kind, or a scaled kind that lacks one of its numbers.
        """
        section: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
        section = section.get(layer_type, section) if isinstance(section, Mapping) else section
        check(
            isinstance(section, Mapping),
            f"rope_parameters or rope_scaling: {section!r} for {layer_type}; an object of rotary settings is right",
        )
        theta: Any = section.get("rope_theta", config.get("rope_theta"))
        check(
            is_number(theta) and theta >= 1,
            "no rotary base: set `rope_theta`, or `rope_parameters.rope_theta`, to a number of 1 or more",
        )
        kind = section.get("rope_type", section.get("type", "default"))
        check(kind in KINDS, f"rope_type {kind!r} is not supported; one of {', '.join(KINDS)} is")
        partial = section.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        check(
            is_number(partial) and 0 < partial <= 1,
            f"partial_rotary_factor is {partial!r}; a number over 0 and up to 1 is right",
        )
        common = cls(theta=float(theta), kind=kind, partial=float(partial))
        if kind == "default":
            return common
        original: Any = section.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        factor: Any = section.get("factor")
        if factor is None and kind == "yarn" and original:
            factor = config["max_position_embeddings"] / original
        check(
            is_number(factor) and SMALLEST <= factor <= LARGEST,
            f"rope_type {kind!r} needs a positive `factor`, up to {LARGEST:.0f}; found {factor!r}",
        )
        scaled = dataclasses.replace(common, factor=float(factor))
        if kind == "linear":
            return scaled
        check(
            is_number(original) and original >= 1,
            f"rope_type {kind!r} needs `original_max_position_embeddings`; found {original!r}",
        )
        scaled = dataclasses.replace(scaled, original_max_positions=int(original))
        return dataclasses.replace(scaled, **(_llama3(section) if kind == "llama3" else _yarn(section, scaled.factor)))

    def to_hf(self) -> dict[str, Any]:
        """Spell the settings as transformers 5's `rope_parameters`."""
        section: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.partial != 1.0:
            section["partial_rotary_factor"] = self.partial
        if self.kind != "default":
            section["factor"] = self.factor
        if self.kind in ("llama3", "yarn"):
            section["original_max_position_embeddings"] = self.original_max_positions
        if self.kind == "llama3":
            section |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            section |= {
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "attention_factor": self.attention_factor,
                "truncate": self.truncate,
            }
        return section

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the inverse frequencies, float64 `[head_dim * partial / 2]`, scaled as the kind says.

        Sources: llama3 and yarn as in transformers' `modeling_rope_utils` (YaRN: arXiv 2309.00071).
        """
        turning = int(head_dim * self.partial)
        exponents = np.arange(0, turning, 2, dtype=np.float64) / turning
        inverse = self.theta**-exponents
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3_frequencies(inverse)
        elif self.kind == "yarn":
            inverse = self._yarn_frequencies(inverse, turning)
        return inverse

    def _llama3_frequencies(self, inverse: np.ndarray) -> np.ndarray:
        turns = self.original_max_positions * inverse / (2 * math.pi)  # over the original context
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse

    def _yarn_frequencies(self, inverse: np.ndarray, turning: int) -> np.ndarray:
        check(self.theta > 1, f"rope_type 'yarn' needs a `rope_theta` over 1; found {self.theta}")

        def dimension(turns: float) -> float:
            length = self.original_max_positions / (turns * 2 * math.pi)
            return turning * math.log(length) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, turning - 1)
        high = high + 0.001 if low == high else high
        interpolated = np.clip((np.arange(turning // 2) - low) / (high - low), 0.0, 1.0)
        return inverse * (1 - interpolated) + inverse / self.factor * interpolated


def is_number(value: Any) -> bool:
    """Say whether a value read from JSON is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _llama3(section: Mapping[str, Any]) -> dict[str, Any]:
    low: Any = section.get("low_freq_factor")
    high: Any = section.get("high_freq_factor")
    if not (is_number(low) and is_number(high) and 0 < low < high):
        raise UserError(
            f"rope_type 'llama3' needs 0 < `low_freq_factor` < `high_freq_factor`; found {low!r} and {high!r}"
        )
    return {"low_freq_factor": float(low), "high_freq_factor": float(high)}


def _yarn(section: Mapping[str, Any], factor: float) -> dict[str, Any]:
    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def number(field: str, default: float) -> float:
        value: Any = section.get(field) or default
        check(
            is_number(value) and SMALLEST <= value <= LARGEST,
            f"{field}: {value!r}; a positive number up to {LARGEST:.0f} is right",
        )
        return float(value)

    both = section.get("mscale") and section.get("mscale_all_dim")
    usual = gain(number("mscale", 1.0)) / gain(number("mscale_all_dim", 1.0)) if both else gain(1.0)
    return {
        "beta_fast": number("beta_fast", 32.0),
        "beta_slow": number("beta_slow", 1.0),
        "attention_factor": number("attention_factor", usual),
        "truncate": bool(section.get("truncate", True)),
    }


def angles(
    rotary: Rotary, head_dim: int, positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
    """Return cos and sin of every position, float32, r = head_dim * partial / 2."""
    # In units of 2**-32 turns, whose products wrap at whole turns: float32 radians are off by 2e-3 at position 40000.
    turns = np.mod(np.round(rotary.frequencies(head_dim) * (2**32 / (2 * math.pi))), 2**32).astype(np.uint32)
    wrapped = positions[..., None].astype(jnp.uint32) * turns[None, None]
    phases = wrapped.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.cos(phases) * rotary.attention_factor, jnp.sin(phases) * rotary.attention_factor


def rotate(
    x: Float[Array, "b n t h"], cos_sin: tuple[Float[Array, "b t r"], Float[Array, "b t r"]]
) -> Float[Array, "b n t h"]:
    """Turn the first 2r dimensions of each head: dimension i pairs with i + r, as in Hugging Face checkpoints."""
    wide = np.promote_types(x.dtype, np.float32)
    cos, sin = (part[:, None].astype(wide) for part in cos_sin)
    r = cos.shape[-1]
    first, second, still = jnp.split(x.astype(wide), [r, 2 * r], axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, still], axis=-1)
    return turned.astype(x.dtype)
