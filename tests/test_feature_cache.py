import dataclasses
import functools
import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.errors import UserError
from dflash_jax.reading import stack
from tests import tiny
from tests.torch_models import random_params
from training import feature_cache, fill_cache, optimizer, prepared
from training.config import OptimizerConfig
from training.data import in_order, on_devices, packed
from training.feature_cache import FeatureCache, open_cache
from training.fill_cache import fill
from training.prepared import open_prepared
from training.step import Batch, Task, TrainState, read_target, train_step

LENGTH, ROWS = 16, 2
TAPS = tiny.DRAFT.target_layer_ids
D = tiny.TARGET.hidden_size
PARAMS = stack(sharding.make_mesh(), tiny.TARGET, TAPS, random_params(tiny.TARGET, 0), through=True)
MESH = sharding.make_mesh()
TASK = Task(tiny.TARGET, tiny.DRAFT, 6, "decay", 4.0, "float32", False, OptimizerConfig(), 10, MESH)
SIZES = [3, 20, 16, 5, 7, 1, 9]  # the second is cut


@pytest.fixture(autouse=True)
def _short_shards(monkeypatch):
    monkeypatch.setattr(feature_cache, "SHARD", 3)


def write(directory, seed=0):
    directory.mkdir()
    rng = np.random.default_rng(seed)
    rows = [(i, rng.integers(0, 11, size).tolist(), (rng.random(size) < 0.8).tolist()) for i, size in enumerate(SIZES)]
    prepared.write_shard(directory, 0, "x", rows)
    prepared.finish(directory, 1, {"tokenizer_hash": "t", "target": "T"})
    return open_prepared(directory)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write(tmp_path_factory.mktemp("cache") / "documents")


def facts(task=TASK, **changes):
    widths = {"features": len(TAPS) * D} | ({"hidden": D} if task.needs_teacher else {})
    return {"target": "abc", "taps": list(TAPS), "widths": widths, "length": LENGTH, "dtype": task.dtype} | changes


def weights(task):
    return jax.tree.map(lambda leaf: leaf.astype(task.dtype), PARAMS)


def filled(path, documents, task=TASK):
    cache = open_cache(path, facts(task), documents)
    fill(cache, task, weights(task))
    return cache


@pytest.fixture
def cache(tmp_path, documents):
    return filled(tmp_path / "cache", documents)


def alone(task, row):
    """What the target makes of one document, at the start of a row."""
    size = min(len(row.tokens), LENGTH)
    tokens, starts = np.zeros((ROWS, LENGTH), np.int32), np.full((ROWS, LENGTH), size, np.int32)
    tokens[0, :size], starts[0, :size] = row.tokens[:size], 0
    found = read_target(task, weights(task), Batch(*map(jnp.asarray, (tokens, np.zeros((ROWS, LENGTH), bool), starts))))
    return {name: np.asarray(getattr(found, name)[0, :size], np.float32) for name in facts(task)["widths"]}


def refusal(act, *arguments):
    with pytest.raises(UserError) as caught:
        act(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("loss", "dtype", "tolerance"), [("decay", "float32", 1e-5), ("kl", "float32", 1e-5), ("kl", "bfloat16", 0.1)]
)
def test_states_are_the_target_s_of_each_document_alone(tmp_path, documents, loss, dtype, tolerance):
    task = dataclasses.replace(TASK, loss=loss, dtype=dtype)
    cache = filled(tmp_path / "cache", documents, task)
    assert cache.shards == 3
    for index, size in enumerate(SIZES):
        found, right = cache.read(index, min(size, LENGTH)), alone(task, documents[index])
        assert list(found) == list(right) == (["features", "hidden"] if loss == "kl" else ["features"])
        for name, values in found.items():
            assert values.dtype.name == dtype
            np.testing.assert_allclose(np.asarray(values, np.float32), right[name], atol=tolerance, err_msg=name)
    part = cache.read(1, 4)["features"]
    assert (part == cache.read(1, LENGTH)["features"][:4]).all()


def test_a_file_is_what_the_module_says(cache):
    rows = np.fromfile(cache.path / "states-00001.bin", np.float32).reshape(-1, 2 * D)
    assert len(rows) == SIZES[3] + SIZES[4] + SIZES[5]
    assert (rows[SIZES[3] : SIZES[3] + SIZES[4]] == cache.read(4, SIZES[4])["features"]).all()
    manifest = json.loads((cache.path / "manifest.json").read_text())
    told = {"format_version": 1, "shard": feature_cache.SHARD, "data_hash": cache.prepared.manifest["data_hash"]}
    assert manifest == facts() | told


def test_a_step_from_the_cache_is_the_step_without_it(tmp_path, documents):
    task = dataclasses.replace(TASK, loss="kl")
    cache = filled(tmp_path / "cache", documents, task)
    [bare, read] = (
        on_devices(in_order(packed(documents, np.arange(len(SIZES)), LENGTH, 0, source), 1, ROWS, MESH), MESH)
        for source in (None, cache)
    )
    assert bare.features is bare.hidden is None
    some = {"embedding": PARAMS["embedding"], "head": PARAMS["head"]}  # nothing else of the target is needed
    results = []
    for batch in (read_target(task, PARAMS, bare), read):  # as the step itself begins
        params = random_params(tiny.DRAFT, 1)
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.build(task.optimizer, task.steps).init(params))
        results.append(train_step(task, some, state, batch, jnp.uint32(0), jnp.zeros(1, jnp.int32)))
    (after, report), (after_cached, report_cached) = results
    assert report.applied
    assert report.sums.blocks > 3
    assert report.grad_norm > 0.01
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    jax.tree.map(close, (report, after.params), (report_cached, after_cached.params))


@pytest.fixture
def computed(monkeypatch):
    """The documents that the target is run over."""
    seen: list[int] = []

    def note(cache, task, target, rows, some):
        seen.extend(document for i in some if i < len(rows) for document in rows.rows[i])
        return states(cache, task, target, rows, some)

    states = fill_cache._states
    monkeypatch.setattr(fill_cache, "_states", note)
    return seen


def test_a_full_cache_computes_nothing(cache, documents, computed, capsys):
    capsys.readouterr()
    filled(cache.path, documents)
    assert computed == []
    assert capsys.readouterr().err == ""


def test_an_interrupted_one_computes_what_is_not_there_and_nothing_else(cache, documents, computed):
    before = {file.name: file.read_bytes() for file in cache.path.glob("states-*")}
    (cache.path / "states-00001.bin").unlink()
    kept = cache.path / "states-00002.bin"
    when = kept.stat().st_mtime_ns
    # What a process that was killed while it wrote leaves behind.
    (cache.path / ".states-00001.bin.0badcafe.partial").write_bytes(b"half")
    filled(cache.path, documents)
    assert sorted(computed) == [3, 4, 5]
    assert {file.name: file.read_bytes() for file in cache.path.glob("states-*")} == before
    assert kept.stat().st_mtime_ns == when
    assert sorted(file.name for file in cache.path.iterdir()) == [".lock", "manifest.json", *sorted(before)]


def test_one_that_stops_in_the_middle_of_a_file_leaves_whole_files_only(tmp_path, documents, monkeypatch, computed):
    calls = iter(range(100))
    write = FeatureCache.write

    def stop(self, shard, states):
        if next(calls) == 1:
            raise KeyboardInterrupt
        write(self, shard, states)

    monkeypatch.setattr(FeatureCache, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path / "cache", documents)
    assert [file.name for file in (tmp_path / "cache").glob("states*")] == ["states-00000.bin"]
    del computed[:]
    filled(tmp_path / "cache", documents)
    assert sorted(computed) == [3, 4, 5, 6]


def test_it_begins_again_where_it_ended_before_it_began(tmp_path, documents):
    path = tmp_path / "cache"
    path.mkdir()
    (path / ".manifest.json.0badcafe.partial").write_text("{")
    cache = filled(path, documents)
    assert not list(path.glob("*.partial"))
    assert cache.has(2)


def test_two_runs_do_not_fill_it_together(tmp_path, documents):
    cache = open_cache(tmp_path / "cache", facts(), documents)
    with cache.filling():
        assert refusal(filled, tmp_path / "cache", documents).startswith(f"{tmp_path / 'cache'}: another run is in it")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "other"),
        ("taps", [0, 1]),
        ("widths", {"features": 32, "hidden": 16}),
        ("length", 17),
        ("dtype", "bfloat16"),
    ],
)
def test_a_cache_of_something_else_is_refused_by_the_field_that_differs(cache, documents, name, value):
    message = refusal(open_cache, cache.path, facts(**{name: value}), documents)
    assert message.startswith(f"--features.cache {cache.path}: {name} is {facts()[name]!r} there and {value!r} here")
    assert message.endswith("another directory is right")


def test_a_cache_of_other_data_is_refused(cache, tmp_path):
    others = write(tmp_path / "others", seed=1)
    assert refusal(open_cache, cache.path, facts(), others).startswith(f"--features.cache {cache.path}: data_hash is ")


def test_a_cache_of_another_format_is_refused(cache, documents):
    file = cache.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 2}))
    assert "format_version is 2 there and 1 here" in refusal(open_cache, cache.path, facts(), documents)
    file.write_text("{")
    assert refusal(open_cache, cache.path, facts(), documents).startswith(f"{file}: not valid JSON")


def test_a_file_that_was_truncated_is_refused_by_name(cache, documents):
    file = cache.path / "states-00001.bin"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-4])
    message = refusal(filled, cache.path, documents)
    assert message == (f"{file}: {size - 4} bytes, and {size} are right; removing it lets it be computed again")


def test_a_file_that_goes_while_it_is_read_is_one_line(cache, documents):
    """Out of the threads that read rows, an OSError would be a traceback."""
    file = cache.path / "states-00001.bin"
    rows = packed(documents, np.arange(len(SIZES)), LENGTH, 0, cache)
    [row] = [i for i, row in enumerate(rows.rows) if 4 in row]
    file.write_bytes(file.read_bytes()[:-400])
    assert refusal(cache.read, 5, 1).startswith(f"{file}: cannot be read (")
    file.unlink()
    assert refusal(rows.__getitem__, row).startswith(f"{file}: cannot be read (")


def test_a_directory_with_something_else_is_refused_and_left_alone(tmp_path, documents):
    (tmp_path / "notes.txt").write_text("mine")
    message = refusal(open_cache, tmp_path, facts(), documents)
    assert message == f"{tmp_path}: not a cache of features; a directory of one's own is right"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").is_file()
    assert refusal(open_cache, tmp_path / "notes.txt", facts(), documents).startswith(f"{tmp_path / 'notes.txt'}: ")


def test_a_disk_without_room_is_one_line_and_leaves_no_half_of_a_file(tmp_path, documents):
    cache = open_cache(tmp_path / "cache", facts(), documents)
    states = [{"features": np.zeros((size, 2 * D), np.float32)} for size in (3, 16, 16)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        message = refusal(cache.write, 0, states)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file = cache.path / "states-00000.bin"
    assert message.startswith(f"{file}: cannot be written (File too large); room for it")
    assert [file.name for file in cache.path.iterdir()] == ["manifest.json"]


def test_rows_bring_their_documents_states_and_zeros_where_there_is_none(cache, documents):
    rows = packed(documents, np.array([0, 3, 4]), LENGTH, 0, cache)
    assert rows.rows == [[4, 3, 0]]
    features = rows[0]["features"]
    at = 0
    for document in rows.rows[0]:
        size = SIZES[document]
        assert (features[at : at + size] == cache.read(document, size)["features"]).all()
        at += size
    assert not features[at:].any()
    assert not rows[-1]["features"].any()
