"""Converting holds a few tensors, however large the model is."""

import ml_dtypes
import numpy as np
import pytest

from benchmarks.conversion import MIB, convert
from convert import flax_checkpoint, names
from convert.published import spell, write_published
from dflash_jax.config import TargetConfig
from tests.torch_models import SIZES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONFIG = SIZES | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_size": 2048,
    "intermediate_size": 8192,
}


def write(directory, layers):
    """Write a target of 96 MiB a layer, whose largest tensor has 32 MiB; return its size."""
    config = TargetConfig.from_hf(CONFIG | {"num_hidden_layers": layers})
    shapes = names.shapes(config)
    directory.mkdir()
    arrays = ((path, np.ones(shape, BFLOAT16)) for path, shape in shapes.items())
    dtypes = dict.fromkeys(shapes, BFLOAT16)
    write_published(directory, spell(config, dtypes), config, dtypes, arrays, 300 * MIB)
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    write(tmp_path / "small", 1)
    size = write(tmp_path / "large", 16)
    assert size > 1500 * MIB
    for command, held in (("to-hf", 0), ("to-flax", flax_checkpoint.AT_ONCE)):
        _, before = convert(command, tmp_path / "small", tmp_path / f"small-{command}")
        _, most = convert(command, tmp_path / "large", tmp_path / f"large-{command}")
        assert most - before < held + 3 * 32 * MIB, f"{command}: {before / MIB:.0f}, {most / MIB:.0f} MiB"
