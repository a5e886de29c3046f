"""A conversion killed at any moment leaves no destination, or a whole one; and the same again works."""

import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import convert
from convert import names
from dflash_jax.config import TargetConfig
from tests.checkpoints import same, write_directory
from tests.torch_models import SIZES

CONFIG = SIZES | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 4000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tensors = {
        name: np.random.default_rng(i).standard_normal(tensor.shape, np.float32)
        for i, (name, tensor) in enumerate(names.expected(TargetConfig.from_hf(CONFIG), "target").items())
    }
    return write_directory(tmp_path_factory.mktemp("killed") / "source", CONFIG, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["to-flax", "to-hf"])
def test_a_conversion_killed_at_twenty_moments_never_looks_complete(source, tmp_path, command):
    arguments = [sys.executable, "-m", "convert", command, str(source)]
    began = time.monotonic()
    subprocess.run([*arguments, str(tmp_path / "whole")], check=True, capture_output=True)
    whole = time.monotonic() - began
    expected = convert.load_target(str(tmp_path / "whole")).params
    killed = 0
    for i in range(20):
        made = tmp_path / f"made-{i}"
        running = subprocess.Popen([*arguments, str(made)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.Random(i).uniform(0.3, 1) * whole)
        running.send_signal(signal.SIGKILL)
        killed += running.wait() == -signal.SIGKILL
        for left in tmp_path.glob(".made-*.partial"):
            shutil.rmtree(left)
        if made.exists():  # it was done already
            assert same(convert.load_target(str(made)).params, expected)
    assert killed > 10
    subprocess.run(
        [*arguments, str(tmp_path / "made-0")], check=not (tmp_path / "made-0").exists(), capture_output=True
    )
    assert same(convert.load_target(str(tmp_path / "made-0")).params, expected)
