"""Plans: machines, meshes, products counted, and the step compiled from shapes alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.errors import UserError
from dflash_jax.presets import TARGETS
from tests import runs, tiny
from training import compile_elsewhere, machines, plan, products, run
from training.config import MeshConfig
from training.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "chips", "topology"),
    [
        ("v5e-1", 1, "1x1"),
        ("v5e-8", 8, "2x4"),
        ("v5litepod-16", 16, "4x4"),
        ("v5e-16", 16, "4x4"),
        ("v6e-8", 8, "2x4"),
        ("v6e-256", 256, "16x16"),
        ("v5p-8", 4, "2x2x1"),
        ("v5p-16", 8, "2x2x2"),
        ("v5p-64", 32, "2x4x4"),
        ("v5p-128", 64, "4x4x4"),
        ("h100-8", 8, "8"),
    ],
)
def test_machines_have_their_vendors_names(name, chips, topology):
    found = machines.find(name)
    assert (found.chips, found.topology) == (chips, topology)


@pytest.mark.parametrize("name", ["v5p-4", "v5p-63", "v5p-48", "v5e-512", "h100-16", "h100-0", "h100", "tpu-8", ""])
def test_what_is_no_machine_is_refused_in_one_line(name):
    with pytest.raises(UserError, match=r"^--plan: [^\n]* is right$"):
        machines.find(name)


def meshes(preset, name, **changes):
    config = runs.changed(PRESETS[preset], **changes)
    found = plan.candidates(config, TARGETS[preset], machines.find(name))
    return [(mesh.data, mesh.fsdp, mesh.tensor) for mesh in found]


def test_meshes_take_all_chips_and_divide_rows_and_heads():
    assert meshes("qwen3-8b", "v6e-8")[:3] == [(1, 8, 1), (2, 4, 1), (1, 4, 2)]
    assert meshes("qwen3-8b", "v5p-64") == [
        (8, 1, 4), (1, 8, 4), (2, 4, 4), (4, 1, 8), (1, 4, 8), (2, 2, 8),
    ]  # fmt: skip
    assert meshes("qwen3-8b", "v5p-64", train__batch_size=32)[:2] == [(32, 1, 1), (1, 32, 1)]
    assert meshes("qwen3-8b", "v6e-8", loss__vocabulary=1001) == meshes("qwen3-8b", "v6e-8")[:2]
    assert meshes("qwen3-8b", "v5e-256") == []


def fake(needed):
    """What compiling says, by the mesh's part of the heads."""

    def compiled(config, target, machine, mesh):
        return plan.Plan(machine, mesh, 8, 80, {"needed_bytes": needed[mesh.tensor], "bytes_per_chip": {}})

    return compiled


def test_meshes_are_tried_until_one_fits(monkeypatch):
    monkeypatch.setattr(plan, "check_packages", lambda machine: None)
    monkeypatch.setattr(plan, "_compiled", fake({1: 40 << 30, 2: 30 << 30, 4: 1}))
    plans = plan.make(PRESETS["qwen3-8b"], None, "v6e-8")
    assert [(one.mesh.data, one.mesh.tensor, one.fits) for one in plans] == [
        (1, 2, True), (1, 1, False), (2, 1, False),
    ]  # fmt: skip


def test_a_mesh_that_cannot_be_compiled_is_passed_over(monkeypatch, capsys):
    def compiled(config, target, machine, mesh):
        if mesh.data == mesh.tensor == 1:
            raise UserError("--plan: cannot be compiled")
        return fake({1: 1, 2: 1})(config, target, machine, mesh)

    monkeypatch.setattr(plan, "check_packages", lambda machine: None)
    monkeypatch.setattr(plan, "_compiled", compiled)
    assert [one.mesh.data for one in plan.make(PRESETS["qwen3-8b"], None, "v6e-8")] == [2]
    assert "--plan: cannot be compiled" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be compiled"):
        plan.make(PRESETS["qwen3-8b"], MeshConfig(1, 8, 1), "v6e-8")


def test_no_mesh_for_the_rows_is_told(monkeypatch):
    monkeypatch.setattr(plan, "check_packages", lambda machine: None)
    with pytest.raises(UserError, match=r"^--train.batch-size: 8 rows suit no mesh of 256 chips with up to 8 of them"):
        plan.make(PRESETS["qwen3-8b"], None, "v5e-256")


@pytest.mark.parametrize(("mesh", "size"), [(None, 200_000), (MeshConfig(1, 4, 2), 4095)], ids=["large", "uneven"])
def test_a_part_of_the_vocabulary_that_cannot_be_is_told(monkeypatch, mesh, size):
    monkeypatch.setattr(plan, "check_packages", lambda machine: None)
    with pytest.raises(UserError, match=rf"^--loss.vocabulary: {size}[ ,][^\n]* is right$"):
        plan.make(runs.changed(PRESETS["qwen3-8b"], loss__vocabulary=size), mesh, "v6e-8")


def test_a_mesh_of_fewer_chips_is_told(monkeypatch):
    monkeypatch.setattr(plan, "check_packages", lambda machine: None)
    with pytest.raises(
        UserError, match=r"^--mesh.data, --mesh.fsdp, --mesh.tensor: 4 together, and v6e-8 has 8 chips;"
    ):
        plan.make(PRESETS["qwen3-8b"], MeshConfig(1, 4, 1), "v6e-8")


def test_a_mesh_that_is_given_is_the_one(monkeypatch, capsys):
    seen = []

    def make(config, mesh, name):
        seen.append((mesh, name))
        found = {"needed_bytes": 3 << 30, "bytes_per_chip": {"target": 1 << 30}, "flops_per_chip": 2e12}
        costs = {"compiler_seconds": 0.1, "compiler_flops": 1e12}
        return [plan.Plan(machines.find(name), mesh or MeshConfig(1, 8, 1), 8, 8000, found | costs)]

    monkeypatch.setattr(plan, "make", make)
    run.main(["qwen3-4b", "--plan", "v6e-8", "--mesh.tensor", "2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert (told["machine"], told["chips"], told["fits"]) == ("v6e-8", 8, True)
    assert told["estimated_step_seconds"] == pytest.approx(0.2)  # the compiler counted half of the products
    assert told["tokens_per_second"] == pytest.approx(40000)
    assert told["share_of_peak"] == pytest.approx(2e12 / (0.2 * 918e12))
    run.main(["qwen3-4b", "--plan", "v6e-8"])
    shown = capsys.readouterr().out
    assert "--mesh.data 1 --mesh.fsdp 8 --mesh.tensor 1" in shown
    assert "fits" in shown
    assert [mesh for mesh, _ in seen] == [MeshConfig(1, 4, 2), None]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("v5p-64", r"`pip install 'jax\[tpu\]'`"), ("h100-8", "`pip install --no-deps jax-cuda12-pjrt==")],
)
def test_a_compiler_that_is_not_there_is_told_with_what_to_do(monkeypatch, name, remedy):
    monkeypatch.setattr(plan, "_is_there", lambda package: False)
    with pytest.raises(UserError, match=rf"^--plan {name}: compiling for it takes .*; {remedy}"):
        plan.make(PRESETS["qwen3-8b"], None, name)


def test_json_is_for_plans():
    with pytest.raises(UserError, match=r"^--json: only with --plan MACHINE$"):
        run.main(["tiny", "--json"])


def test_products_in_loops_are_counted_as_often_as_they_run():
    a = jnp.zeros((3, 4))

    def looped(x):
        x, _ = jax.lax.scan(lambda x, _: (jax.jit(jnp.dot)(x, jnp.zeros((4, 4))), None), x, None, length=5)
        x = jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: x @ jnp.zeros((4, 4)), x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ jnp.zeros((4, 7)), lambda x: jnp.zeros((3, 7)), x)

    one = 2 * 3 * 4 * 4
    assert products.flops(jax.make_jaxpr(looped)(a).jaxpr, turns=2.5) == 5 * one + 2.5 * one + 2 * 3 * 4 * 7
    both = jax.make_jaxpr(jax.grad(lambda x: (jax.checkpoint(jnp.dot)(x, jnp.zeros((4, 4))) ** 2).sum()))(a).jaxpr
    assert products.flops(both, 1) == 2 * one


def test_products_on_shards_are_those_of_all_devices():
    mesh = jax.sharding.AbstractMesh((2, 1, 1), sharding.AXES)
    part = jax.shard_map(lambda x: x @ jnp.zeros((4, 4)), mesh=mesh, in_specs=sharding.ROWS, out_specs=sharding.ROWS)
    shape = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    assert products.flops(jax.make_jaxpr(part)(shape).jaxpr, 1) == 2 * 6 * 4 * 4


@pytest.mark.parametrize("cached", [False, True])
def test_the_step_of_a_run_is_compiled_from_shapes(cached):
    config = runs.changed(runs.CONFIG, features__cache="somewhere" if cached else None, loss__vocabulary=8)
    config = runs.changed(config, draft__mask_token_id=9)
    found = compile_elsewhere.compile_step(config, tiny.TARGET, sharding.make_mesh(), machines.TPU)
    _, (weights, state, batch, *_) = compile_elsewhere.describe(config, tiny.TARGET, sharding.make_mesh())
    kinds = found["bytes_per_chip"]
    assert kinds["draft"] == sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
    assert kinds["moments"] == 2 * kinds["draft"] + 2 * 4  # and two counts
    assert ("stack_0" in weights) is not cached
    assert (batch.features is None) is not cached
    assert found["needed_bytes"] == sum(kinds.values())
    assert found["flops_per_chip"] > 0
    assert found["exchanges"] == {}
    json.dumps(found)


def test_a_product_of_groups_multiplies_each_row_once():
    rows, experts = jnp.ones((6, 4)), jnp.ones((3, 4, 5))
    grouped = jax.make_jaxpr(jax.lax.ragged_dot)(rows, experts, jnp.asarray([1, 2, 3], jnp.int32))
    assert products.flops(grouped.jaxpr, 1) == 2 * 6 * 4 * 5


def test_exchanges_are_counted_in_a_programs_text():
    text = """
  %a = bf16[8,4]{1,0} all-gather(%x), dimensions={0}
  %b = (f32[2]{0}, f32[16]{0:T(128)}) all-gather-start(%y), dimensions={0}
  %c = f32[16]{0} all-gather-done(%b)
  %d = f32[] all-reduce(%z), to_apply=%add
  %e = (f32[8]{0}, f32[8]{0}) all-to-all(%z, %x), dimensions={0}
  %f = (f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}, /*index=5*/f32[6]{0}) all-reduce(%p, %q), to_apply=%add
"""
    assert compile_elsewhere.exchanges(text) == {
        "all-gather": {"count": 2, "bytes": 64 + 64},
        "all-reduce": {"count": 2, "bytes": 4 + 64},
        "all-to-all": {"count": 1, "bytes": 64},
    }


def test_settings_survive_the_way_to_the_other_process():
    for config in PRESETS.values():
        assert type(config).from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_room_that_a_compiler_does_not_find_is_no_fit():
    found = {
        "refused": "RESOURCE_EXHAUSTED",
        "needed_bytes": 20 * 2**30,
        "bytes_per_chip": {"target": 1},
        "flops_per_chip": 1e12,
    }
    made = plan.Plan(machines.find("v5e-4"), MeshConfig(1, 4, 1), 8, 80, found)
    assert not made.fits
    assert "too much" in plan.text([made])
    assert np.isclose(made.to_dict()["needed_bytes_per_chip"], 20 * 2**30)
