"""Plans of published sizes, with the compilers of TPUs and GPUs; some minutes each."""

import json
import os
import subprocess
import sys

import pytest

from dflash_jax.errors import UserError
from training import machines, plan

# As a user's; the tests' own flags are for a quick compiler of CPUs.
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["v5e-1", "v5e-2", "v5e-4", "v5p-8", "v5p-16", "v6e-1", "v6e-8", "h100-1", "h100-8"])
def test_a_machine_has_as_many_devices_as_its_name_says(name):
    try:
        plan.check_packages(machines.find(name))
    except UserError as missing:
        pytest.skip(str(missing))
    code = (
        "import sys; from training import compile_elsewhere, machines; machine = machines.find(sys.argv[1]); "
        "assert len(compile_elsewhere.devices_of(machine)) == machine.chips"
    )
    subprocess.run([sys.executable, "-c", code, name], env=ELSEWHERE, check=True)


@pytest.mark.parametrize(
    ("preset", "name", "more"),
    [
        ("qwen3-8b", "v5p-64", ["--train.batch-size", "32"]),
        ("qwen3-4b", "h100-8", []),
        ("qwen3-0.6b", "v5e-4", ["--train.batch-size", "4"]),
    ],
)
def test_a_plan_of_a_published_size_fits(preset, name, more):
    try:
        plan.check_packages(machines.find(name))
    except UserError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "training.run", preset, "--plan", name, "--json", *more]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=ELSEWHERE).stdout)
    assert found["fits"]
    assert 0 < found["needed_bytes_per_chip"] < found["hbm_bytes_per_chip"]
    assert found["mesh"]["fsdp"] == found["chips"]
    largest = max(exchange["bytes"] for exchange in found["exchanges"].values())
    assert largest < 16 * 2**30
    if machines.find(name).chip.platform == machines.TPU:
        assert 0.05 < found["share_of_peak"] < 1
