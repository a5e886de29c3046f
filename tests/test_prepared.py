import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.sources import open_source
from dflash_jax.errors import UserError
from tests import pair, runs
from training import prepared
from training.prepared import check_tokenizer, open_prepared, template_hash, tokenizer_hash

FACTS = {"tokenizer_hash": "t", "template_hash": "c", "thinking": False, "target": "T", "vocab_size": 300}
# Line, token ids, supervised: two shards, and a line with two documents.
SHARDS = [
    [(1, [5, 6, 7], [False, True, True]), (3, [0], [True])],
    [(4, list(range(300)), [i % 3 == 0 for i in range(300)]), (4, [2**31 - 1, 8], [False, True])],
]


@pytest.fixture
def directory(tmp_path):
    for number, rows in enumerate(SHARDS):
        prepared.write_shard(tmp_path, number, "x", rows)
    prepared.finish(tmp_path, len(SHARDS), FACTS)
    return tmp_path


def refusal(act, *arguments):
    with pytest.raises(UserError) as caught:
        act(*arguments)
    return str(caught.value)


def test_what_was_written_is_read(directory):
    rows = open_prepared(directory)
    assert len(rows) == 4
    for index, (_, tokens, supervised) in enumerate(row for shard in SHARDS for row in shard):
        row = rows[index]
        assert row.tokens.tolist() == tokens
        assert row.supervised.tolist() == supervised
        assert (row.tokens.dtype, row.supervised.dtype) == (np.int32, np.bool_)
    assert rows.lengths.tolist() == [3, 1, 300, 2]
    assert rows.supervised.tolist() == [2, 1, 100, 1]
    assert rows.lines.tolist() == [1, 3, 4, 4]
    assert rows[-1].tokens.tolist() == [2**31 - 1, 8]
    with pytest.raises(IndexError):
        rows[4]


def test_the_manifest_says_what_it_is(directory):
    rows = open_prepared(str(directory))
    assert rows.tokenizer_hash == "t"
    assert rows.manifest["format_version"] == 1
    assert rows.manifest["counts"] == {"rows": 3, "documents": 4, "tokens": 306, "supervised_tokens": 104}
    assert {name: rows.manifest[name] for name in FACTS} == FACTS
    assert sorted(file.name for file in directory.iterdir()) == [
        "index.npy",
        "manifest.json",
        "rows-00000.array_record",
        "rows-00001.array_record",
    ]


def test_the_data_hash_is_that_of_the_rows(tmp_path):
    hashes = []
    for name, token in (("one", 5), ("same", 5), ("other", 6)):
        (tmp_path / name).mkdir()
        prepared.write_shard(tmp_path / name, 0, name, [(1, [token, 7], [False, True])])
        prepared.finish(tmp_path / name, 1, FACTS)
        hashes.append(open_prepared(tmp_path / name).manifest["data_hash"])
    assert hashes[0] == hashes[1] != hashes[2]


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=40))
def test_a_record_holds_any_row(pairs):
    tokens, supervised = map(list, zip(*pairs, strict=True))
    row = prepared._decode(prepared._encode(tokens, supervised))
    assert (row.tokens.tolist(), row.supervised.tolist()) == (tokens, supervised)


def test_a_record_is_what_the_module_says():
    assert prepared._encode([1, 258], [True, False]) == b"\2\0\0\0\1\0\0\0\2\1\0\0\1"


def test_it_travels_to_other_processes_and_threads(directory):
    rows = open_prepared(directory)
    rows[0]
    copy = pickle.loads(pickle.dumps(rows))
    wanted = [random.Random(0).randrange(4) for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda index: copy[index].tokens.tolist(), wanted)
    assert list(read) == [rows[index].tokens.tolist() for index in wanted]


def test_no_more_shards_are_open_than_a_process_may_have(directory, monkeypatch):
    monkeypatch.setattr(prepared, "OPEN_READERS", 1)
    rows = open_prepared(directory)
    assert [len(rows[index].tokens) for index in (0, 2, 1, 3)] == [3, 300, 1, 2]
    assert len(rows._readers) == 1


def test_what_is_not_there_or_not_finished_is_refused(directory):
    assert refusal(open_prepared, directory / "absent").startswith(f"{directory / 'absent'}: no such directory")
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    assert "format_version 2 is not supported; 1 is" in refusal(open_prepared, directory)
    (directory / "manifest.json").write_text(json.dumps({"format_version": 1}))
    assert refusal(open_prepared, directory).startswith(f"{directory / 'manifest.json'}: a value of the wrong type")
    (directory / "manifest.json").unlink()
    assert "no manifest.json in it; a directory that `python -m" in refusal(open_prepared, directory)


def test_a_shard_that_is_missing_or_of_another_size_is_noticed_on_opening(directory):
    shard = directory / "rows-00001.array_record"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert refusal(open_prepared, directory).startswith(f"{shard}: {len(content) - 1} bytes, and {len(content)}")
    shard.unlink()
    assert refusal(open_prepared, directory).startswith(f"{shard}: missing")


def test_an_index_that_changed_is_noticed_on_opening(directory):
    index = directory / "index.npy"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    assert refusal(open_prepared, directory).startswith(f"{index}: not the index")
    index.unlink()
    assert refusal(open_prepared, directory).startswith(f"{index}: cannot be read")


def test_a_flipped_bit_is_never_read_as_a_row(directory):
    shard = directory / "rows-00000.array_record"
    content = shard.read_bytes()
    used = max(i for i, byte in enumerate(content[: 1 << 15]) if byte) + 1
    refused = 0
    for place in range(0, used, 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        shard.write_bytes(changed)
        rows = open_prepared(directory)
        for index, (_, tokens, supervised) in enumerate(SHARDS[0]):
            try:
                row = rows[index]
            except UserError as error:
                assert str(error).startswith(f"{shard}: row {index} cannot be read")  # noqa: PT017
                refused += 1
            else:
                assert (row.tokens.tolist(), row.supervised.tolist()) == (tokens, supervised)
    assert refused > 20


def test_a_shard_that_was_exchanged_or_removed_after_opening_is_refused(directory):
    one, two = (directory / f"rows-0000{number}.array_record" for number in range(2))
    two.write_bytes(one.read_bytes())
    rows = open_prepared(directory)
    assert refusal(rows.__getitem__, 2).startswith(f"{two}: row 2 is not the one in index.npy")
    one.unlink()
    assert refusal(rows.__getitem__, 0).startswith(f"{one}: row 0 cannot be read")


def test_a_shard_is_kept_only_whole_and_from_the_same(tmp_path):
    prepared.write_shard(tmp_path, 0, "x", SHARDS[0])
    assert prepared.is_written(tmp_path, 0, "x")
    assert not prepared.is_written(tmp_path, 0, "y")
    assert not prepared.is_written(tmp_path, 1, "x")
    shard = tmp_path / "rows-00000.array_record"
    shard.write_bytes(b"")
    assert not prepared.is_written(tmp_path, 0, "x")
    shard.unlink()
    assert not prepared.is_written(tmp_path, 0, "x")
    (tmp_path / "rows-00000.json").write_text("{")
    assert not prepared.is_written(tmp_path, 0, "x")


def test_rows_that_stop_coming_leave_nothing(tmp_path):
    def rows():
        yield SHARDS[0][0]
        raise UserError("line 2")

    assert refusal(prepared.write_shard, tmp_path, 0, "x", rows()) == "line 2"
    assert list(tmp_path.iterdir()) == []


def test_hashes_tell_tokenizers_and_templates_apart():
    tokenizer = pair.tokenizer()
    before = tokenizer_hash(tokenizer), template_hash(tokenizer)
    tokenizer("text", truncation=True, max_length=9)
    assert (tokenizer_hash(tokenizer), template_hash(tokenizer)) == before
    assert (tokenizer_hash(pair.tokenizer()), template_hash(pair.tokenizer())) == before
    assert template_hash(pair.tokenizer(template=None)) != template_hash(tokenizer)
    tokenizer.add_tokens(["more"])
    assert tokenizer_hash(tokenizer) != before[0]


def test_data_of_another_tokenizer_is_refused(tmp_path):
    source = open_source(str(pair.write_target(tmp_path / "target")))
    check_tokenizer(open_prepared(runs.write_prepared(tmp_path / "right")), source)
    other = open_prepared(runs.write_prepared(tmp_path / "wrong", tokenizer_hash="f00", target="some/other"))
    with pytest.raises(UserError) as refused:
        check_tokenizer(other, source)
    assert str(refused.value) == (
        f"--data {tmp_path}/wrong: prepared with the tokenizer of some/other, which is not that of {tmp_path}/target; "
        "preparing it for this target is right"
    )
