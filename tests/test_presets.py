import math

import jax
import pytest

from dflash_jax import parameters, presets

# The sizes of the published safetensors files; a tied head counts once.
COUNTS = {
    "qwen3-0.6b": 596049920,
    "qwen3-1.7b": 1720574976,
    "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200,
    "qwen3-32b": 32762123264,
    "qwen3-coder-30b-a3b": 30532122624,
    "llama3.2-1b": 1235814400,
    "llama3.2-3b": 3212749824,
    "llama3.1-8b": 8030261248,
}


def test_every_preset_has_a_count_to_meet():
    assert set(presets.TARGETS) == set(COUNTS)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_preset_has_as_many_parameters_as_the_published_model(name, count):
    tree = parameters.shapes(presets.TARGETS[name])
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) == count
