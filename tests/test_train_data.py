import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import sharding
from dflash_jax.errors import UserError
from training import prepared
from training.data import PackedRows, batches, in_order, on_devices, packed, steps_of
from training.prepared import open_prepared

MESH = sharding.make_mesh()
FACTS = {"tokenizer_hash": "t", "template_hash": "c", "thinking": False, "target": "T", "vocab_size": 300}
# Line, token ids, supervised.
DOCUMENTS = [
    (1, [5, 6, 7], [False, True, True]),
    (2, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [False] * 6 + [True] * 5),
    (2, [8, 9], [True, True]),
    (4, [30, 31, 32, 33], [True, False, True, True]),
]


def write(directory, documents):
    prepared.write_shard(directory, 0, "x", documents[: len(documents) // 2])
    prepared.write_shard(directory, 1, "x", documents[len(documents) // 2 :])
    prepared.finish(directory, 2, FACTS)
    return open_prepared(directory)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write(tmp_path_factory.mktemp("documents"), DOCUMENTS)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """Seven rows of a document each."""
    many = write(tmp_path_factory.mktemp("seven"), [(i, [i] * 8, [True] * 8) for i in range(7)])
    return packed(many, np.arange(7), 8, 0)


def test_documents_lie_one_after_the_other_and_what_follows_is_a_document_of_its_own(documents):
    rows = PackedRows(documents, [[0, 3], [1], [2]], 8)
    row = rows[0]
    assert row["tokens"].tolist() == [5, 6, 7, 30, 31, 32, 33, 0]
    assert row["supervised"].tolist() == [False, True, True, True, False, True, True, False]
    assert row["starts"].tolist() == [0, 0, 0, 3, 3, 3, 3, 7]
    assert rows.size(0) == 7
    assert (row["tokens"].dtype, row["supervised"].dtype, row["starts"].dtype) == (np.int32, np.bool_, np.int32)
    assert sorted(row) == ["starts", "supervised", "tokens"]


def test_a_document_longer_than_a_row_is_cut_at_its_end(documents):
    rows = PackedRows(documents, [[1]], 8)
    row = rows[0]
    assert row["tokens"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert row["supervised"].tolist() == [False] * 6 + [True] * 2
    assert row["starts"].tolist() == [0] * 8
    assert rows.size(0) == 8


def test_a_row_without_documents_supervises_nothing(documents):
    rows = PackedRows(documents, [[0, 3], [1]], 8)
    row = rows[-1]
    assert not row["tokens"].any()
    assert not row["supervised"].any()
    assert rows.size(-1) == 0
    some = in_order(rows, 1, 3, MESH)
    assert some.indices.tolist() == [1, -1, -1]
    assert some.contents["tokens"].shape == (3, 8)


def test_rows_know_their_lines_documents_and_padding(documents):
    rows = PackedRows(documents, [[0, 3], [1], [2]], 8)
    assert [rows.lines(i) for i in range(3)] == [[1, 4], [2], [2]]
    assert rows.documents == 4
    assert rows.padding == pytest.approx(7 / 24)


def test_some_of_the_documents_are_packed_and_no_other(documents):
    rows = packed(documents, np.array([3, 0]), 8, 0)
    assert rows.rows == [[3, 0]]
    assert packed(documents, np.zeros(0, np.int64), 8, 0).rows == []


def test_steps_are_those_of_whole_epochs():
    assert steps_of(rows=7, batch_size=2, epochs=3) == 10
    assert steps_of(rows=1, batch_size=8, epochs=8) == 1
    with pytest.raises(UserError, match=r"^--train.batch-size: 8 rows a step, and 3 rows in 2 epochs make none"):
        steps_of(rows=3, batch_size=8, epochs=2)


def rows_of(iterator, count):
    return [next(iterator).indices.tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def order(seven):
    """The rows of 35 batches of two: ten epochs."""
    return rows_of(batches(seven, 2, 0, MESH), 35)


def test_each_epoch_has_every_row_once_in_another_order(order):
    epochs = np.concatenate(order).reshape(10, 7)
    assert (np.sort(epochs, axis=1) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 7


def test_the_order_follows_from_the_seed(seven, order):
    assert rows_of(batches(seven, 2, 0, MESH), 6) == order[:6]
    assert rows_of(batches(seven, 2, 1, MESH), 6) != order[:6]


def test_a_batch_is_rows_stacked(seven):
    element = next(batches(seven, 2, 0, MESH))
    batch = on_devices(element, MESH)
    for place, row in enumerate(element.indices.tolist()):
        assert (batch.tokens[place] == seven[row]["tokens"]).all()
    assert batch.tokens.shape == batch.supervised.shape == batch.starts.shape == (2, 8)
    assert batch.features is batch.hidden is None


@settings(max_examples=12)
@given(st.integers(0, 20), st.integers(0, 9))
def test_it_goes_on_exactly_where_it_was(seven, order, taken, dropped):
    """Although more batches than were taken have been read ahead, and whatever was taken after that."""
    iterator = batches(seven, 2, 0, MESH)
    assert rows_of(iterator, taken) == order[:taken]
    position = json.loads(json.dumps(iterator.get_state()))
    other = batches(seven, 2, 0, MESH)
    other.set_state(position)
    assert rows_of(other, 3) == order[taken : taken + 3]
    assert other.get_state() == {**position, "next_index": taken + 3}
    rows_of(iterator, dropped)
    iterator.set_state(position)
    assert rows_of(iterator, 2) == order[taken : taken + 2]


def test_fewer_rows_than_a_batch_are_repeated_within_it(documents):
    element = next(batches(PackedRows(documents, [[0]], 8), 3, 0, MESH))
    assert element.indices.tolist() == [0, 0, 0]


def test_a_shard_that_is_damaged_ends_the_batches_with_one_line(tmp_path):
    many = write(tmp_path, [(i, list(range(40)), [True] * 40) for i in range(20)])
    shard = tmp_path / "rows-00001.array_record"
    content = bytearray(shard.read_bytes())
    used = max(place for place, byte in enumerate(content[: 1 << 15]) if byte)
    content[used // 2 : used] = bytes(used - used // 2)
    shard.write_bytes(content)
    iterator = batches(packed(many, np.arange(20), 64, 0), 2, 0, MESH)
    with pytest.raises(UserError) as caught:
        rows_of(iterator, 10)
    assert str(caught.value).startswith(f"{shard}: row 1")
    assert "\n" not in str(caught.value)
