"""What is computed of costs that compilers tell; compiling itself takes minutes, and compilers."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import compile_decoding, compiled
from benchmarks.compiled import Cost
from dflash_jax import sharding
from dflash_jax.errors import UserError
from tests import tiny
from training import machines, plan


def cost(seconds, temporaries=0.0, caches=100.0):
    return Cost(10.0, 20.0, seconds, temporaries, 100.0, caches, 3)


def test_costs_are_carried_on_in_a_straight_line():
    two, four = Cost(10, 100, 1.0, 8, 2, 4, 5), Cost(16, 120, 1.5, 8, 3, 8, 9)
    assert Cost.at(36, {4: four, 2: two}) == Cost(112, 440, 9.5, 8, 19, 72, 73)


def test_a_cost_that_is_not_told_stays_untold():
    two, four = Cost(None, None, None, 8, 2, 4, 0), Cost(None, None, None, 10, 3, 8, 0)
    assert Cost.at(6, {2: two, 4: four}) == Cost(None, None, None, 12, 4, 12, 0)
    assert two.row("loop") == "| loop |  |  |  | 0.0 | 0 |"


def test_a_row_is_in_the_units_of_the_header():
    row = Cost(3.8892e9, 9.04e9, 0.001655, 10.04e6, 1, 1, 75.0).row("token")
    assert row == "| token | 3,889.2 | 9.0 | 1,655 | 10.0 | 75 |"
    assert compiled.HEADER.splitlines()[0].count("|") == row.count("|")


def test_speedups_are_acceptance_lengths_over_the_cost_of_a_block():
    costs = {
        "token": cost(2.0), "verify": cost(2.2), "draft": cost(0.42), "draft of one": cost(0.4), "block": cost(2.5),
        "loop": cost(None, temporaries=4.0),
    }  # fmt: skip
    assert list(compiled.summary(costs, (5.0, 2.5))) == [
        "loop: temporaries 4.0% of the caches, 0.0 MB, of which 100% stay in place",
        "verify / token 1.10",
        "draft / draft of one 1.05",
        "a block costs 1.25 tokens; speedup by acceptance length 3.20 at 4, 4.00 at 5, 4.80 at 6, 5.60 at 7, 6.40 at 8",
        "published 2.5 at 5.0: a block costs 2.00 tokens; here 4.00",
    ]
    assert list(compiled.summary({"loop": costs["loop"]}, None)) == [
        "loop: temporaries 4.0% of the caches, 0.0 MB, of which 100% stay in place"
    ]


def test_a_compiler_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(plan, "_is_there", lambda package: False)
    with pytest.raises(UserError, match=r"^--machines v6e-8: compiling for it takes libtpu; [^\n]* is right$"):
        compiled.main(["--machines", "v6e-8"])


def test_a_machine_that_is_not_known_is_one_line():
    command = [sys.executable, "-m", "benchmarks.compiled", "--machines", "v9-8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "v9-8" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("program", compile_decoding.PROGRAMS)
def test_every_program_compiles_and_leaves_the_caches_in_place(program):
    found = compile_decoding.compile_program(program, tiny.TARGET, tiny.DRAFT, sharding.make_mesh(), {})
    assert found["caches"] > 0
    assert found["exchanges"] == 0
    assert (found["flops"] is None) is (program == "loop")
    assert (found["aliased"] >= found["caches"]) is not program.startswith("draft")


def test_a_cut_target_keeps_its_drafts_sizes():
    target, draft = compile_decoding.models_of("qwen3-8b", 4)
    assert (target.num_layers, draft.num_layers) == (4, 5)
    assert draft.target_layer_ids == (1, 3, 3, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "machine"), [("qwen3-8b", "v5p-8"), ("qwen3-8b", "v6e-8")])
def test_a_pass_of_a_block_costs_little_more_than_a_tokens(target, machine):
    try:
        plan.check_packages(machines.find(machine))
    except UserError as missing:
        pytest.skip(str(missing))
    asked = [f"{program}:{depth}" for program in ("token", "verify") for depth in compiled.DEPTHS]
    found: dict[str, dict[int, Cost]] = {"token": {}, "verify": {}}
    for program, depth, one in compiled._compiled(target, machine, [*asked, "draft:2", "draft of one:2"]):
        found.setdefault(program, {})[depth] = one
    seconds: dict[str, Any] = {program: Cost.at(36, found[program]).seconds for program in ("token", "verify")}
    seconds |= {program: found[program][2].seconds for program in ("draft", "draft of one")}
    assert seconds["verify"] / seconds["token"] < 1.1
    assert seconds["draft"] / seconds["draft of one"] < 1.1
