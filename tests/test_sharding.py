import dataclasses
import json
import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from convert import names
from dflash_jax import sharding
from dflash_jax.config import ExpertsConfig, LayerConfig
from dflash_jax.errors import UserError
from inference import generate
from tests import mesh_worker, pair, processes, tiny

BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


EXPERTS = LayerConfig(tiny.ROTARY, experts=ExpertsConfig(5, 2, 8, normalised=True))


@pytest.mark.parametrize(
    "config",
    [
        tiny.TARGET,
        dataclasses.replace(tiny.TARGET, **BIASED),
        dataclasses.replace(tiny.TARGET, tie_word_embeddings=True, family="llama"),
        dataclasses.replace(tiny.TARGET, family="qwen3_moe", layers=(EXPERTS, tiny.TARGET.layers[0])),
        tiny.DRAFT,
        dataclasses.replace(tiny.DRAFT, **BIASED),
        dataclasses.replace(tiny.DRAFT, own_vocabulary=5, own_embedding=True),
    ],
)
def test_every_parameter_has_one_rule_with_an_axis_for_each_of_its_own(config):
    for path, shape in names.shapes(config).items():
        assert len(sharding.parameter_spec(path)) <= len(shape), path


def test_a_parameter_without_a_rule_or_with_two_raises(monkeypatch):
    with pytest.raises(ValueError, match="layers_0/router/kernel: 0 sharding rules"):
        sharding.parameter_spec("layers_0/router/kernel")
    monkeypatch.setitem(sharding.RULES, r"he.d", PartitionSpec())
    with pytest.raises(ValueError, match="head: 2 sharding rules"):
        sharding.parameter_spec("head")


def test_what_is_read_by_rows_is_split_by_rows():
    # A tensor-parallel layer exchanges nothing between its first product and its last.
    assert sharding.parameter_spec("layers_7/mlp/up_proj/kernel") == PartitionSpec("fsdp", "tensor")
    assert sharding.parameter_spec("layers_7/mlp/down_proj/kernel") == PartitionSpec("tensor", "fsdp")
    assert sharding.parameter_spec("layers_7/attention/q_norm/scale") == PartitionSpec()
    assert PartitionSpec("data", "tensor") == sharding.CACHE


def test_all_axes_are_there():
    mesh = sharding.make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"data": 0}, "mesh: data=0; 1 or more"),
        ({"data": 2, "tensor": 400}, "mesh: data=2, fsdp=1, tensor=400 takes 800 devices; 1 are there; sizes"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, reason):
    with pytest.raises(UserError, match=reason):
        sharding.make_mesh(**sizes, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, 1, 4), "tensor=4 does not divide 2 key-value heads"),
        ((1, 1, 2), "tensor=2 does not divide 11 vocabulary rows"),
        ((1, 3, 1), "fsdp=3 does not divide 16 hidden columns"),
    ],
)
def test_a_mesh_that_would_split_a_head_is_refused(sizes, reason):
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    with pytest.raises(UserError, match=reason):
        sharding.check_mesh(mesh, tiny.TARGET)


def test_a_mesh_is_read():
    assert sharding.read_mesh("tensor=4") == {"tensor": 4}
    assert sharding.read_mesh("data=2,tensor=4") == {"data": 2, "tensor": 4}


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=x", "data=0", "data=-1", "model=2", "data=1,data=2", "data=2;tensor=4", "2,4"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(UserError, match="sizes by axis, as in data=2,tensor=4, are right"):
        sharding.read_mesh(text)


@pytest.fixture(scope="module")
def alone():
    return mesh_worker.answers(tiny.engine(mesh_worker.TARGET, mesh_worker.DRAFT, batch_size=4))


@pytest.mark.parametrize(("count", "devices"), [(1, 8), (2, 4)])
def test_a_mesh_of_eight_devices_decodes_as_one_device_does(alone, count, devices):
    statuses, (out, *rest), errors = processes.run(count, devices, "tests.mesh_worker")
    assert statuses == [0] * count, errors
    assert rest == [""] * (count - 1)
    result = json.loads(out)
    assert result["answers"] == alone
    assert result["again"] is True
    assert result["compiled"] == []
    assert result["processes"] == count
    assert result["cache"] == [2, 1, 256, 6]  # two of four rows, one of four heads
    cache_row = 256 * 6
    assert all(size < cache_row for size in result["exchanges"].values()), result["exchanges"]


def test_the_command_spreads_over_devices_and_processes(tmp_path):
    target, draft = pair.write_target(tmp_path / "target"), pair.write_draft(tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [i, 7]}) + "\n" for i in range(9)))
    command = ["inference.generate", "--ckpt", target, "--draft", draft, "--prompts", prompts, "--batch-size", "4"]
    command = [
        *map(str, command),
        "--max-new-tokens",
        "9",
        "--temperature",
        "2",
        "--mesh",
        "data=4,tensor=2",
        "--output",
    ]
    output = tmp_path / "out.jsonl"
    statuses, out, err = processes.run(2, 4, *command, str(output))
    assert statuses == [0, 0], err
    assert out == ["", ""]
    # What takes seconds is told again, with how far along it is.
    told = [line.split()[0] for line in err[0].splitlines() if ": " not in line]
    assert told == ["reading", "reading", "compiling", "answering"]
    assert err[1] == ""
    alone = [*command[1:-3], "--output", str(tmp_path / "alone.jsonl")]  # without --mesh
    generate.main(alone)
    found, expected = (
        [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]
        for path in (output, tmp_path / "alone.jsonl")
    )
    assert len(found) == 9
    assert found == expected
    statuses, out, err = processes.run(2, 4, *command, str(output))
    assert statuses == [2, 2]
    assert re.fullmatch(r"error: --output .*out\.jsonl: there already; .*\n", err[0])
    assert err[1] == "error: --output: the first process tells what is wrong with it\n"
    statuses, out, err = processes.run(2, 4, *command, str(tmp_path / "new"), "--mesh", "data=4")
    assert statuses == [2, 2]
    assert all(
        "--mesh: 4 of 8 devices leave process 1 without one; sizes that make 8 are right" in line for line in err
    )
    statuses, out, err = processes.run(1, 8, *command, str(tmp_path / "new"), "--mesh", "tensor=5")
    assert statuses == [2]
    assert re.search(r"error: .*--mesh: tensor=5 does not divide an axis of \d+; a number that does is right\n", err[0])
    statuses, out, err = processes.run(1, 8, *command, str(tmp_path / "new"), "--batch-size", "6")
    assert statuses == [2]
    assert "error: --batch-size: 6 rows do not divide over data=4 of the --mesh; a multiple of it is right" in err[0]
