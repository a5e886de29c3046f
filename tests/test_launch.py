"""Every file of launch/ is read as its launcher would, and the command in it as training.run would."""

import itertools
import math
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from dflash_jax import sharding
from dflash_jax.errors import NotNowError, UserError
from training import flags, run
from training.presets import PRESETS

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
MANIFESTS = sorted(LAUNCH.glob("*.yaml"))
POD = (ROOT / "docs" / "pods.md").read_text()
COMMAND = re.compile(r"python -m training\.run ((?:\\\n|[^\n])*)")
# Chips or GPUs of what a file asks for, and hosts of it where the file says them.
DEVICES = {"tpu_vm.sh": 16, "xpk.sh": 16, "gke_tpu.yaml": 16, "slurm.sbatch": 16, "sky.yaml": 16}


def commands(text):
    """The arguments of every training command, with the shell's own left out."""
    for found in COMMAND.findall(text):
        joined = re.sub(r"\\\n", " ", found).rstrip().removesuffix("&").rstrip()
        # In xpk.sh and tpu_vm.sh it is the end of a quoted text.
        joined = joined.removesuffix('"') if joined.count('"') % 2 else joined
        if "--data" in joined:
            yield shlex.split(joined)


def settings(arguments):
    """What training.run makes of them."""
    parsed = run._parser(PRESETS[arguments[0]]).parse_args(arguments)
    assert parsed.data
    assert parsed.output
    return flags.override(PRESETS[parsed.preset], parsed)


def devices(config):
    return config.mesh.data * config.mesh.fsdp * config.mesh.tensor


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_parse(file):
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("file", DEVICES)
def test_each_file_runs_one_command_on_all_of_its_devices(file):
    [arguments] = commands((LAUNCH / file).read_text())
    config = settings(arguments)
    assert devices(config) == DEVICES[file]
    assert config.train.batch_size % (config.mesh.data * config.mesh.fsdp) == 0


def described(kind, platform, counts, slices=1):
    """Devices as their platform describes them: a TPU's by where it lies in the torus."""
    places = list(itertools.product(*map(range, reversed(counts))))
    return [
        types.SimpleNamespace(
            id=i + len(places) * one,
            process_index=(i + len(places) * one) // 4,
            device_kind=kind,
            platform=platform,
            coords=place[::-1],
            core_on_chip=0,
            slice_index=one,
        )
        for one in range(slices)
        for i, place in enumerate(places)
    ]


TORUS = described("TPU v6 lite", "tpu", (4, 4, 1))
CUBE = described("TPU v5p", "tpu", (2, 4, 4))
NODES = described("NVIDIA H100", "gpu", (8,), slices=2)


@pytest.mark.parametrize(
    ("file", "there"),
    [*((file, TORUS) for file in DEVICES if file != "slurm.sbatch"), ("slurm.sbatch", NODES), ("sky.yaml", NODES)],
)
def test_the_mesh_of_a_file_can_be_laid_out_on_its_machine(file, there):
    [arguments] = commands((LAUNCH / file).read_text())
    mesh = settings(arguments).mesh
    laid_out = sharding._laid_out(mesh.data, mesh.fsdp, mesh.tensor, there)
    assert laid_out.shape == (2, 8, 1)
    assert {device.id for device in laid_out.flat} == set(range(16))
    assert [{device.slice_index for device in group.flat} for group in laid_out] in ([{0}, {0}], [{0}, {1}])


def test_devices_that_make_no_torus_are_told():
    with pytest.raises(UserError, match=r"^mesh: data=1, fsdp=3, tensor=1 cannot be laid out on these 3 devices \("):
        sharding._laid_out(1, 3, 1, described("TPU v6 lite", "tpu", (2, 2, 1))[:3])


@pytest.mark.parametrize("sizes", [(1, 8, 4), (2, 4, 4), (1, 4, 8), (2, 2, 8), (32, 1, 1), (1, 32, 1)])
def test_every_mesh_of_a_slice_can_be_laid_out(sizes):
    data, fsdp, tensor = sizes
    assert sharding._laid_out(data, fsdp, tensor, CUBE).shape == sizes


@pytest.mark.parametrize(("sizes", "split"), [((1, 16, 1), 1), ((2, 8, 1), 0), ((4, 2, 2), 0)])
def test_slices_are_told_apart_by_data_and_then_by_fsdp(sizes, split):
    data, fsdp, tensor = sizes
    laid_out = np.moveaxis(sharding._laid_out(data, fsdp, tensor, NODES), split, 0)
    assert [{device.slice_index for device in part.flat} for part in np.split(laid_out, 2)] == [{0}, {1}]


def test_slices_that_would_be_cut_are_refused():
    with pytest.raises(UserError, match=r"^mesh: data=1, fsdp=1 over 2 slices of TPUs, or nodes of GPUs; a multiple"):
        sharding._laid_out(1, 1, 16, NODES)
    with pytest.raises(UserError, match=r"^mesh: 12 devices are 8, 4 of 2 slices .* as many of each are right"):
        sharding._laid_out(2, 6, 1, NODES[:12])


def test_no_file_is_left_out():
    with_command = {file.name for file in LAUNCH.iterdir() if any(commands(file.read_text()))}
    assert with_command == set(DEVICES)
    assert {f"../launch/{name}" for name in [*DEVICES, "Dockerfile"]} == set(re.findall(r"\]\((\S*launch/\S+)\)", POD))


@pytest.mark.parametrize(
    "arguments",
    [
        "--data d --output o --mesh.pipeline 2",
        "--data d --output o --mesh.data two",
        "--data d --output o --mesh.data 0",
    ],
)
def test_a_flag_that_training_does_not_know_would_be_found(arguments):
    [arguments] = commands(f"python -m training.run tiny {arguments}\n")
    with pytest.raises(UserError):
        settings(arguments)


def test_commands_of_the_document_are_of_the_same_kind():
    found = [settings(arguments) for arguments in commands(POD)]
    assert [devices(config) for config in found] == [8, 16]
    for config in found:
        assert config.train.batch_size % (config.mesh.data * config.mesh.fsdp) == 0


def test_the_document_names_files_that_are_there():
    for name in re.findall(r"launch/[\w.]+", POD):
        assert (ROOT / name).exists(), name


def test_the_slice_of_gke_has_as_many_chips_as_its_topology():
    manifest = yaml.safe_load((LAUNCH / "gke_tpu.yaml").read_text())
    [job] = [job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert job["parallelism"] == job["completions"]
    assert job["completions"] * container["resources"]["limits"]["google.com/tpu"] == chips == DEVICES["gke_tpu.yaml"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    [script] = container["args"]
    assert script.startswith("exec bash launch/restartable.sh")
    assert list(commands(script))


def test_skypilot_replaces_what_was_stopped():
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    stopped = [NotNowError.status, 128 + signal.SIGTERM]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == stopped
    assert task["run"].startswith("exec bash launch/restartable.sh")
    [arguments] = commands(task["run"])
    places = [arguments[arguments.index(flag) + 1] for flag in ("--data", "--output")]
    assert all(place.startswith(f"{next(iter(task['file_mounts']))}/") for place in places)


def test_a_node_under_slurm_has_all_of_its_gpus():
    script = (LAUNCH / "slurm.sbatch").read_text()
    wanted = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", script))
    [ids] = [found.split(",") for found in re.findall(r"JAX_LOCAL_DEVICE_IDS=(\S+)", script)]
    assert ids == [str(device) for device in range(int(wanted["gpus-per-node"]))]
    assert int(wanted["nodes"]) * len(ids) == DEVICES["slurm.sbatch"]
    assert wanted["ntasks-per-node"] == "1"


def test_the_image_holds_what_it_installs_and_runs():
    copied = set(" ".join(re.findall(r"^COPY (.+) \S+$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)).split())
    assert {"pyproject.toml", "convert", "dflash_jax", "inference", "training", "launch"} <= copied
    assert all((ROOT / name).exists() for name in copied)


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print("saved"), sys.exit()))
"""


@pytest.mark.parametrize(
    ("program", "stop", "status", "printed"),
    [
        (f"{SAVES}print('ready', flush=True); time.sleep(60)", True, 143, "saved\n"),
        ("import time; print('ready', flush=True); time.sleep(60)", True, 143, ""),
        ("print('ready', flush=True)", False, 0, ""),
        ("import sys; print('ready', flush=True); sys.exit(2)", False, 2, ""),
    ],
    ids=["saves", "is killed", "is done", "fails"],
)
def test_what_was_stopped_is_told_from_what_is_done(program, stop, status, printed):
    run = ["bash", str(LAUNCH / "restartable.sh"), sys.executable, "-c", program]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        time.sleep(0.1)
        if stop:
            started.send_signal(signal.SIGTERM)
        out, _ = started.communicate(timeout=30)
    assert (started.returncode, out) == (status, printed)
