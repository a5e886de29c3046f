import json
import re
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import UserError
from training.checkpoints import Checkpoints
from training.config import CheckpointConfig
from training.step import TrainState

POSITION = {"next_index": 7}


def state(number, size=3_000):
    rng = np.random.default_rng(number)
    params = {"layer": {"kernel": jnp.asarray(rng.standard_normal(size), jnp.float32)}}
    moments = ({"count": jnp.asarray(number, jnp.int32)}, jax.tree.map(lambda leaf: leaf / 3, params))
    return TrainState(jnp.asarray(number, jnp.int32), params, moments)


def begin(output, keep=2):
    return Checkpoints(output, CheckpointConfig(keep=keep))


def save(output, *steps, keep=2, scores=None, size=3_000):
    with begin(output, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step, size), POSITION | {"step": step}, (scores or {}).get(step))


def restored(output, size=3_000):
    with begin(output) as checkpoints:
        return checkpoints.restore(state(0, size))


def refusal(action, *arguments, **options):
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(one, other):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), one, other))


def there(output):
    return {path.name for path in (output / "checkpoints").iterdir()}


def test_what_was_saved_comes_back_to_the_bit_with_its_position(tmp_path):
    save(tmp_path, 3)
    found, position = restored(tmp_path)
    assert same(found, state(3))
    assert position == POSITION | {"step": 3}


def test_nothing_is_there_before_the_first(tmp_path):
    with begin(tmp_path) as checkpoints:
        assert checkpoints.latest is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    save(tmp_path, *range(1, 8), scores={2: 1.5, 4: 2.5, 6: 2.0})
    assert there(tmp_path) == {"4", "6", "7"}
    # Gone on with, the best is still known.
    save(tmp_path, 8, 9, 10, scores={8: 2.4})
    assert there(tmp_path) == {"4", "9", "10"}


def test_a_step_that_takes_the_state_over_does_not_reach_what_is_being_saved(tmp_path):
    spoil = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 + 7, state), donate_argnums=0)
    with begin(tmp_path, keep=10) as checkpoints:
        for step in range(1, 6):
            begun = state(step, 300_000)
            checkpoints.save(step, begun, POSITION, None)
            jax.block_until_ready(spoil(begun))
    for step in range(5, 0, -1):
        assert same(restored(tmp_path, 300_000)[0], state(step, 300_000))
        shutil.rmtree(tmp_path / "checkpoints" / str(step))


def test_what_was_not_committed_is_no_checkpoint_and_its_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1, 2)
    place = tmp_path / "checkpoints"
    shutil.copytree(place / "2", place / "3.orbax-checkpoint-tmp")  # how orbax calls it meanwhile
    (place / "3.orbax-checkpoint-tmp" / "commit_success.txt").unlink()
    shutil.copytree(place / "2", place / "4")  # how a copy that was interrupted looks
    (place / "4" / "commit_success.txt").unlink()
    (place / "5").mkdir()
    with begin(tmp_path) as checkpoints:
        assert checkpoints.latest == 2
        assert same(checkpoints.restore(state(0))[0], state(2))
        for step in (3, 4):
            checkpoints.save(step, state(step), POSITION, None)
    assert there(tmp_path) == {"3", "4"}
    assert same(restored(tmp_path)[0], state(4))


def test_whatever_is_damaged_is_told_or_does_no_harm(tmp_path, capfd):
    """Orbax's arrays have no checksum: a bit that flipped would be trained on."""
    save(tmp_path / "run", 1, 2, scores={1: 1.5, 2: 2.5})
    files = [file for file in (tmp_path / "run" / "checkpoints" / "2").rglob("*") if file.is_file()]
    damages = {
        "flipped": lambda content: content[: len(content) // 2] + b"\x55" + content[len(content) // 2 + 1 :],
        "cut": lambda content: content[: len(content) // 2],
        "empty": lambda content: b"",
    }
    told = []
    for file in files:
        content = file.read_bytes()
        for damage in damages.values():
            file.write_bytes(damage(content))
            try:
                found, position = restored(tmp_path / "run")
            except UserError as error:
                told.append(str(error))
            else:
                assert same(found, state(2))
                assert position == POSITION | {"step": 2}
        file.write_bytes(content)
    assert len(told) > 10
    right = re.escape(f"{tmp_path}/run/checkpoints/2: not readable as a checkpoint of this run (") + (
        r"[^\n]+\); removing it, to go on from the one before, is right"
    )
    assert all(re.fullmatch(right, message) for message in told)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    assert same(restored(tmp_path / "run")[0], state(1))
    assert capfd.readouterr().err == ""


def test_another_state_is_not_one_of_this_run(tmp_path):
    save(tmp_path, 1)
    assert f"{tmp_path}/checkpoints/1: not readable as a checkpoint of this run" in refusal(restored, tmp_path, 4_000)


def test_a_full_disk_is_one_line_and_what_was_there_is_whole(tmp_path, capfd):
    save(tmp_path, 1, 2, size=100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        message = refusal(save, tmp_path, 3, 4, 5, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message == (
        f"{tmp_path}/checkpoints: a checkpoint cannot be written (File too large); those that are there are whole, and "
        "the same command goes on from the newest"
    )
    assert same(restored(tmp_path, 100_000)[0], state(2, 100_000))
    save(tmp_path, 3, size=100_000)
    assert there(tmp_path) == {"2", "3"}
    assert same(restored(tmp_path, 100_000)[0], state(3, 100_000))
    assert capfd.readouterr().err == ""


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    assert refusal(begin, tmp_path).startswith(f"{tmp_path}/checkpoints: a checkpoint cannot be written (")


def test_what_is_being_saved_is_there_whatever_else_goes_wrong(tmp_path):
    def fail():
        with begin(tmp_path) as checkpoints:
            checkpoints.save(1, state(1, 300_000), POSITION, None)
            raise UserError("something else")

    assert refusal(fail) == "something else"
    assert same(restored(tmp_path, 300_000)[0], state(1, 300_000))


def test_position_and_state_are_in_one_commit(tmp_path):
    save(tmp_path, 1)
    beside = json.loads((tmp_path / "checkpoints" / "1" / "data" / "metadata").read_text())
    assert beside["position"] == POSITION | {"step": 1}
