import contextlib
import json
import resource
import struct
import subprocess
import sys

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from dflash_jax.errors import UserError
from dflash_jax.loss import Sums
from training.metrics import Log, ratios

VALUES = {"loss": 2.5, "acceptance_length": 1.25, "tokens_per_second": 1000.0, "accuracy_by_slot": [0.5, None]}


def log(output, *steps, first=0, of=10):
    with Log(output, first, of).shown() as opened:
        for step in steps:
            opened.write(step, VALUES)


def steps(output):
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def events(output):
    """The records of event files: a length, its checksum, so many bytes, and their checksum."""
    found = []
    for file in (output / "tensorboard").iterdir():
        content = file.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            for at, part in ((8, content[:8]), (12 + size, content[12 : 12 + size])):
                assert content[at : at + 4] == struct.pack("<I", masked_crc32c(part))
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return sorted(found, key=lambda event: event.wall_time)


@contextlib.contextmanager
def files_up_to(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def sums(*parts):
    return Sums(*(jnp.asarray(part, jnp.float32) for part in parts))


def test_ratios_are_over_all_blocks_and_none_where_there_are_none():
    one = sums(6, 3, [2, 1], [4, 0], 5, 4)
    none = sums(0, 0, [0, 0], [0, 0], 0, 0)
    found = ratios([one, none])
    assert found == {"loss": 2.0, "accuracy": 0.75, "accuracy_by_slot": [0.5, None], "acceptance_length": 1.25}
    assert ratios([none]) == {
        "loss": None,
        "accuracy": None,
        "accuracy_by_slot": [None, None],
        "acceptance_length": None,
    }


def test_lines_of_steps_that_are_taken_again_are_dropped(tmp_path):
    log(tmp_path, 1, 2, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss"')  # killed meanwhile
    log(tmp_path, 3, 4, first=2)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_line_that_is_none_is_refused(tmp_path):
    for line in ("loss 3\n", "{}\n", "3\n", "\0\0\0\n"):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line)
        with pytest.raises(UserError, match=r"^\S+/metrics\.jsonl: a value of the wrong type or form") as caught:
            log(tmp_path, 2, first=1)
        assert "\n" not in str(caught.value)


def test_tensorboard_reads_the_same_numbers_and_where_a_run_went_on(tmp_path):
    log(tmp_path, 1, 2, 3)
    log(tmp_path, 3, first=2)
    log(tmp_path, first=2)
    found = events(tmp_path)
    scalars = [(event.step, {one.tag: one.simple_value for one in event.summary.value}) for event in found]
    expected = {"loss": 2.5, "acceptance_length": 1.25, "tokens_per_second": 1000.0, "accuracy_by_slot/1": 0.5}
    assert [one for one in scalars if one[1]] == [(step, expected) for step in (1, 2, 3, 3)]
    # TensorBoard forgets earlier files' events from this step on.
    assert [event.step for event in found if event.session_log.status == 1] == [1, 3, 3]
    assert sum(event.file_version == "brain.Event:2" for event in found) == 3


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    log(tmp_path, 1)
    with files_up_to((tmp_path / "metrics.jsonl").stat().st_size + 10), pytest.raises(UserError) as caught:
        log(tmp_path, 2, first=1)
    assert str(caught.value) == (
        f"{tmp_path}/metrics.jsonl: cannot be written (File too large); more room, then again, is right"
    )
    log(tmp_path, 2, first=1)
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_is_told_for_tensorboard_too_and_nothing_waits(tmp_path, capfd):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match=r"^\S+/tensorboard: cannot be written \(File exists\); more room"):
        log(tmp_path, 1)
    (tmp_path / "tensorboard").unlink()

    def fill():
        with Log(tmp_path, 0, 10).shown() as opened:
            for step in range(1, 40):
                (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
                opened.write(step, VALUES)

    with files_up_to(2_000), pytest.raises(UserError, match=r"^\S+/tensorboard: cannot be written \(File too large\)"):
        fill()
    assert "Traceback" not in capfd.readouterr().err


def test_lines_say_what_is_shown(tmp_path, capsys):
    log(tmp_path, 7)
    assert capsys.readouterr().err == "step 7 of 10: loss 2.500, acceptance length 1.25, 1,000 tokens/s\n"


def test_lines_say_how_long_the_rest_should_take(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 130.0, 7_300.0, 7_400.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    log(tmp_path, 2, 4, 5, 10)
    assert [line.partition("tokens/s")[2] for line in capsys.readouterr().err.splitlines()] == [
        "",  # steps of 15 s, six left
        ", about 2 min left",
        ", about 3 h left",
        "",
    ]


def test_steps_of_any_size_are_spelled_right(tmp_path):
    log(tmp_path, 1, 127, 128, 70_000, 2**31, of=2**31)
    assert [event.step for event in events(tmp_path)][2:] == [1, 127, 128, 70_000, 2**31]


def test_a_run_imports_no_torch():
    code = "import sys, training.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
