import dataclasses
import fcntl
import importlib.metadata
import json

import jax
import pytest

from dflash_jax.errors import UserError
from tests import pair, runs
from training import record
from training.config import LossConfig

FACTS = {"target_weights": "a1", "data": "b2", "draft": {"num_hidden_layers": 2, "dflash_config": {"mask_token_id": 5}}}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "deep" / "run"


def write(output, config=runs.CONFIG, facts=FACTS):
    with record.only_run_in(output):
        record.write_or_compare(output, config, facts)


def refusal(action, *arguments):
    with pytest.raises(UserError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_config_is_resolved_and_says_what_computed(output):
    write(output)
    written = json.loads((output / "config.json").read_text())
    assert written["settings"]["train"] == dataclasses.asdict(runs.CONFIG.train)
    assert written["settings"]["draft"]["mask_token_id"] == pair.MASK
    assert {name: written[name] for name in FACTS} == FACTS
    assert written["versions"]["jax"] == importlib.metadata.version("jax")
    assert {"jaxlib", "optax", "orbax-checkpoint", "grain", "flax", "dflash-jax"} <= written["versions"].keys()
    assert written["device"] == jax.devices()[0].device_kind


CHANGES = {
    "seed": 1,
    "init_from": "target",
    "train__steps": 21,
    "train__batch_size": 3,
    "train__length": 47,
    "train__anchors": 5,
    "train__dtype": "bfloat16",
    "draft__layers": 1,
    "draft__block_size": 4,
    "draft__mask_token_id": 3,
    "loss__name": "kl",
    "loss__vocabulary": 40,
    "optimizer__name": "muon",
    "optimizer__learning_rate": 2e-3,
    "optimizer__clip": 2.0,
    "optimizer__warmup": 0.5,
    "optimizer__weight_decay": 0.1,
    "draft__taps": 2,
    "train__epochs": 2,
    "evaluation__rows": 3,
}
HARMLESS = {
    "preset": "other",
    "target": "moved/elsewhere",
    "train__log_every": 3,
    "train__remat": True,
    "checkpoint__every": 7,
    "checkpoint__keep": 1,
    "evaluation__every": 7,
    "features__cache": "features",
    "export__dtype": "float32",
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_setting_is_refused_by_its_name(output, field):
    write(output)
    section, _, name = field.rpartition("__")
    before = getattr(getattr(runs.CONFIG, section) if section else runs.CONFIG, name)
    other = runs.changed(runs.CONFIG, **{field: CHANGES[field]})
    facts = FACTS | {"draft": {"num_hidden_layers": 9}}  # what follows from settings is not told as well
    assert refusal(write, output, other, facts) == (
        f"--output {output}: not the run that its config.json tells of: {field.replace('__', '.')} is {before!r} there "
        f"and {CHANGES[field]!r} here; the same, or another output, is right"
    )
    write(output)


def test_every_setting_is_either_of_the_run_or_harmless():
    settings = {
        f"{name}__{field}" if isinstance(value, dict) else name
        for name, value in dataclasses.asdict(runs.CONFIG).items()
        for field in (value if isinstance(value, dict) else [""])
    }
    assert settings == {*CHANGES, *HARMLESS, "loss__gamma"}
    assert len(record.MAY_DIFFER) == len(HARMLESS)


def test_every_setting_that_differs_is_named(output):
    write(output)
    other = runs.changed(runs.CONFIG, seed=1, train__length=47, loss=LossConfig(name="kl", gamma=3.0))
    message = refusal(write, output, other)
    for told in (
        "seed is 0 there and 1 here",
        "train.length is 48 there and 47 here",
        "loss.name is 'decay' there and 'kl' here",
        "loss.gamma is None there and 3.0 here",
    ):
        assert told in message


def test_settings_that_change_no_bit_may_differ(output):
    write(output)
    write(output, runs.changed(runs.CONFIG, **HARMLESS))
    assert json.loads((output / "config.json").read_text())["settings"]["preset"] == "tiny"


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        ({"target_weights": "c3"}, "target_weights is 'a1' there and 'c3' here"),
        ({"data": "c3"}, "data is 'b2' there and 'c3' here"),
        (
            {"draft": {"num_hidden_layers": 2, "dflash_config": {"mask_token_id": 6}}},
            "draft.dflash_config.mask_token_id is 5 there and 6 here",
        ),
    ],
)
def test_another_target_data_or_draft_is_refused(output, fact, told):
    write(output)
    assert told in refusal(write, output, runs.CONFIG, FACTS | fact)


def test_a_config_that_is_none_is_refused(output):
    write(output)
    (output / "config.json").write_text('{"settings": ')
    assert f"{output}/config.json: not valid JSON" in refusal(write, output)


def enter(output):
    with record.only_run_in(output):
        pass


def test_two_runs_do_not_share_an_output(output):
    enter(output)
    with (output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refusal(enter, output) == (
            f"--output {output}: another run is in it; waiting for that, or another name, is right"
        )
    enter(output)


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    pair.write_target(tmp_path / "model")  # with a config.json
    runs.write_prepared(tmp_path / "prepared")
    (tmp_path / "prepared" / ".lock").touch()  # as training.prepare leaves it
    before = sorted(tmp_path.rglob("*"))
    for name in ("notes", "model", "prepared"):
        assert refusal(enter, tmp_path / name) == (
            f"--output {tmp_path / name}: holds something else than a run; another name is right"
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    told = refusal(enter, tmp_path / "file")
    assert told == f"--output {tmp_path}/file: no directory; one, or a new name, is right"
    told = refusal(enter, tmp_path / "file" / "run")
    assert told.startswith(f"--output {tmp_path}/file/run: cannot be written (Not a directory); a place")
    assert "(File name too long)" in refusal(enter, tmp_path / ("x" * 300))


def test_what_a_killed_run_had_not_written_whole_is_removed(output):
    write(output)
    (output / ".draft.0123.partial").mkdir()
    (output / ".draft.0123.partial" / "model.safetensors").touch()
    (output / ".metrics.jsonl.0123.partial").touch()
    write(output)
    assert {file.name for file in output.iterdir()} == {"config.json", ".lock"}


def test_a_run_that_was_killed_before_it_wrote_anything_begins_anew(output):
    enter(output)
    (output / ".config.json.0123.partial").touch()
    write(output)
