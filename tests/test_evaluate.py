"""Law 12: what training says of a draft is what decoding does with it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import convert
from convert import LoadedDraft, LoadedTarget
from convert.published import publish
from dflash_jax import cache, sharding
from dflash_jax.anchors import Anchors
from dflash_jax.config import LayerConfig
from dflash_jax.draft import Draft, adjust_logits
from dflash_jax.errors import UserError
from dflash_jax.reading import stack
from dflash_jax.rope import Rotary
from dflash_jax.target import Target
from inference.engine import Engine, SamplingConfig
from tests import pair, tiny
from tests.torch_models import random_params
from training import evaluate, prepare, prepared
from training.config import OptimizerConfig
from training.evaluation import walk
from training.prepared import Row, open_prepared
from training.step import Batch, Task, block_slots, draft_blocks, read_target

KEYS = ["acceptance_length_random", "acceptance_length_walk", "accuracy_by_slot", "walks"]
TARGET_PARAMS = random_params(tiny.TARGET, 0)
THIRD = Rotary(theta=1e4, partial=1 / 3)  # of a head of 6
# One layer sees all and turns a third of each head, the other has a window.
DRAFT = dataclasses.replace(tiny.DRAFT, layers=(LayerConfig(THIRD, causal=False), LayerConfig(tiny.ROTARY, window=6)))
SCALED = dataclasses.replace(
    tiny.DRAFT,
    layers=(LayerConfig(tiny.ROTARY, window=5, causal=False), LayerConfig(THIRD, causal=True)),
    block_size=5,
    input_embedding_scale=1.5,
    output_multiplier=0.5,
    final_logit_softcapping=2.0,
)


def write(directory, rows):
    """Prepare rows: the line of each, its prompt and its answer."""
    directory.mkdir(exist_ok=True)
    made = [(line, [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for line, prompt, answer in rows]
    prepared.write_shard(directory, 0, "x", made)
    prepared.finish(directory, 1, {"tokenizer_hash": "t", "target": "T"})
    return open_prepared(directory)


def loaded():
    target = LoadedTarget(tiny.TARGET, random_params(tiny.TARGET, 0), (4,), "target")
    return target, LoadedDraft(DRAFT, random_params(DRAFT, 1), "draft")


def judged(rows):
    target, draft = loaded()
    return evaluate.evaluate(target, draft, rows, "float32")


# What is accepted at each anchor of a document of ten tokens.
ACCEPTED = dict(enumerate([2, 0, 1, 0, 3, 0, 0, 0, 5, 0]))


@pytest.mark.parametrize(
    ("supervised", "emitted"),
    [
        ("..xxxxxxx.", [2, 4]),  # from 2 to 4, and to 8
        ("xxxxxxxxxx", [3, 1, 4, 1]),  # 0, 3, 4, 8, and one more, where six were emitted
        ("xx..xxxx..", [1, 3]),  # the end cuts both blocks
        (".x.x.x.x..", []),  # answers of one token have no block
        ("..........", []),
        ("..x.xxx.xx", [2, 1]),  # several answers
        (".......xxx", [1, 1]),
        ("xxxxxxxxx.", [3, 1, 4]),
    ],
)
def test_answers_are_walked_block_by_block(supervised, emitted):
    assert walk(ACCEPTED, np.array([mark == "x" for mark in supervised])) == emitted


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_the_blocks_of_an_answer_are_its_tokens_but_the_first(tokens):
    supervised = np.array([mark for mark, _ in tokens], bool)
    # Only at anchors: a token and the next are supervised (law 11).
    accepted = {
        place: count
        for place, (_, count) in enumerate(tokens)
        if supervised[place] and place + 1 < len(tokens) and supervised[place + 1]
    }
    emitted = walk(accepted, supervised)
    answers = "".join("x" if mark else "." for mark in supervised).split(".")
    assert sum(emitted) == sum(max(len(answer) - 1, 0) for answer in answers)
    assert all(1 <= size <= 8 for size in emitted)


@pytest.fixture(scope="module")
def decoded():
    """Prompts of mixed lengths and their greedy answers, some ended by a stop and some by a cap."""
    target, draft = loaded()
    engine = Engine(target, draft, max_length=192, batch_size=4)
    prompts = tiny.prompts(16, seed=3)
    answers = [
        *engine.generate(prompts[:8], SamplingConfig(max_new_tokens=21)),
        *engine.generate(prompts[8:], SamplingConfig(max_new_tokens=70)),
    ]
    return list(zip(prompts, answers, strict=True))


def test_walks_are_the_blocks_that_decoding_emitted(decoded, tmp_path):
    """Law 12. A training that left the rotary share out once had good numbers, and drafts that were not accepted."""
    assert {answer.finish_reason for _, answer in decoded} == {"stop", "length"}
    rows = write(tmp_path, [(line, prompt, answer.token_ids) for line, (prompt, answer) in enumerate(decoded)])
    emitted = [answer.emitted_per_block for _, answer in decoded]
    assert len({size for blocks in emitted for size in blocks}) > 3
    report = judged(rows)
    assert list(report) == KEYS
    assert report["walks"] == emitted
    assert report["acceptance_length_walk"] == pytest.approx(np.mean(np.concatenate(emitted)))


def test_answers_of_one_line_are_joined_and_lines_stay_in_order(decoded, tmp_path):
    found = decoded[8:12]
    lines = [3, 3, 5, 9]
    rows = write(
        tmp_path, [(line, prompt, answer.token_ids) for line, (prompt, answer) in zip(lines, found, strict=True)]
    )
    one, two, three, four = (answer.emitted_per_block for _, answer in found)
    walks = judged(rows)["walks"]
    assert walks == [one + two, three, four]


def test_rows_without_a_block_have_no_walk_and_no_number(tmp_path):
    rows = write(tmp_path, [(1, [3, 4], [5]), (2, [1], [])])
    assert judged(rows) == {
        "acceptance_length_random": None,
        "acceptance_length_walk": None,
        "accuracy_by_slot": [None] * 7,
        "walks": [[], []],
    }


def test_more_anchors_than_are_judged_at_once_are_all_judged(tmp_path):
    """Blocks come 64 at a time."""
    answer = np.random.default_rng(0).integers(0, 11, 100).tolist()
    rows = write(tmp_path, [(1, [2, 3], answer)])
    target, draft = loaded()
    weights = stack(sharding.make_mesh(), tiny.TARGET, DRAFT.target_layer_ids, target.params, through=False)
    seen = {anchor: hits for anchor, hits, _ in evaluate._judged(task(DRAFT), weights, draft, rows[0])}
    assert list(seen) == list(range(2, 101))
    report = judged(rows)
    mean = np.mean([np.cumprod(hits).sum() for hits in seen.values()])
    assert report["acceptance_length_random"] == pytest.approx(1 + mean)
    assert report["accuracy_by_slot"][0] == pytest.approx(np.mean([hits[0] for hits in seen.values()]))


def task(draft):
    return Task(
        tiny.TARGET, draft, evaluate.BLOCKS, "decay", 1.0, "float32", False, OptimizerConfig(), 1, sharding.make_mesh()
    )


@pytest.mark.parametrize(
    ("size", "room"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 512), (385, 512), (3072, 4096)]
)
def test_programs_are_compiled_for_few_lengths(monkeypatch, size, room):
    """A program for every 128 tokens would be 24 for documents of 3,072, and a large target takes a minute for each."""
    seen = []

    def read(task, target, batch):
        seen.append(batch.tokens.shape)
        return batch

    monkeypatch.setattr(evaluate, "read_target", read)
    target, draft = loaded()
    row = Row(np.zeros(size, np.int32), np.zeros(size, bool))
    assert list(evaluate._judged(task(DRAFT), target.params, draft, row)) == []
    assert seen == [(1, room)]


ROWS, START, SIZE = 128, 17, 40  # of a row, and where its second document starts
ANCHORS = [START, START + 1, START + 6, START + 23, START + SIZE - 2]


@pytest.fixture(scope="module")
def row():
    """A row of three documents with its features."""
    tokens = np.random.default_rng(5).integers(0, 11, (1, ROWS)).astype(np.int32)
    starts = np.repeat([0, START, START + SIZE], [START, SIZE, ROWS - START - SIZE])[None].astype(np.int32)
    batch = Batch(jnp.asarray(tokens), jnp.ones((1, ROWS), bool), jnp.asarray(starts))
    layers = random_params(tiny.TARGET, 0)
    return read_target(
        task(DRAFT), stack(sharding.make_mesh(), tiny.TARGET, DRAFT.target_layer_ids, layers, through=False), batch
    )


@jax.jit
def features_of(prefix):
    model, zero = Target(tiny.TARGET, DRAFT.target_layer_ids), jnp.zeros(1, jnp.int32)
    return tiny.run(model, TARGET_PARAMS, prefix, cache.empty(tiny.TARGET, 1, ROWS, jnp.dtype("float32")), zero)[1]


@pytest.mark.parametrize("config", [DRAFT, SCALED])
def test_a_block_of_training_has_the_logits_of_decoding(row, config):
    """Once labels and context were off by one between the two, and once the rotary share was."""
    target, draft = TARGET_PARAMS, random_params(config, 1)
    placed = Anchors(jnp.asarray([ANCHORS], jnp.int32), jnp.ones((1, len(ANCHORS)), bool))

    @jax.jit
    def train():
        states = draft_blocks(task(config), target, draft, row, placed)
        return block_slots(task(config), target, row, placed, states).logits

    @jax.jit
    def decode(features, length, anchor):
        empty = cache.empty(config, 1, ROWS, jnp.dtype("float32"))
        context = tiny.run(Draft(config), draft, features, empty, jnp.zeros(1, jnp.int32), method="extend")
        block = jnp.full((1, config.block_size), config.mask_token_id).at[0, 0].set(anchor)
        embedded = tiny.run(Target(tiny.TARGET), target, block, method="embed")
        states = tiny.run(Draft(config), draft, embedded, context, length[None])
        return adjust_logits(config, tiny.run(Target(tiny.TARGET), target, states[:, 1:], method="logits"))[0]

    trained = train()
    for place, anchor in enumerate(ANCHORS):
        size = anchor - START
        prefix = np.zeros((1, ROWS), np.int32)  # nothing of what follows
        prefix[0, :size] = row.tokens[0, START:anchor]
        decoded = decode(features_of(prefix), jnp.int32(size), row.tokens[0, anchor])
        np.testing.assert_allclose(trained[place], decoded, atol=1e-5)
    assert float(jnp.std(trained)) > 0.1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, its draft, and data with two of the target's own answers, and one that is cut."""
    directory = tmp_path_factory.mktemp("files")
    pair.write_target(directory / "target")
    pair.write_draft(directory / "draft")
    answers = [pair.ANSWER_IDS, pair.ANSWER_IDS[:7]]
    rows = [{"prompt_ids": [pair.ANSWER_IDS[-2]], "response_ids": answer} for answer in answers]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare.main(
        [
            "--target",
            str(directory / "target"),
            "--data",
            str(directory / "rows.jsonl"),
            "--output",
            str(directory / "data"),
        ]
    )
    return directory


@pytest.fixture
def run(files, capsys):
    def run(*more, **others):
        names = {"target": files / "target", "draft": files / "draft", "data": files / "data"} | others
        capsys.readouterr()
        evaluate.main([*(part for name, path in names.items() for part in (f"--{name}", str(path))), *more])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(run):
    def refused(*more, **others):
        with pytest.raises(UserError) as caught:
            run(*more, **others)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused


def test_json_has_what_is_promised(run):
    [line] = run("--json").splitlines()
    report = json.loads(line)
    assert list(report) == KEYS
    assert report["walks"] == [pair.EMITTED, [1, 1, 1, 2, 1]]
    assert report["acceptance_length_walk"] == pytest.approx(17 / 15)
    # The draft always says the token at place 4: the first slot of the anchor before it, the second of the one before.
    assert report["acceptance_length_random"] == pytest.approx(1 + 2 / 17)
    # Of answers of 12 and 7 tokens, 11 and 6 have a next one, 10 and 5 a second, and so on.
    assert report["accuracy_by_slot"] == pytest.approx([2 / 17, 2 / 15, 2 / 13, 2 / 11, 0, 0, 0])


def test_text_says_the_same(run):
    assert run() == (
        "acceptance length  1.118 at all anchors, 1.133 walking 2 rows\n"
        "accuracy by slot   0.118  0.133  0.154  0.182  0.000  0.000  0.000\n"
    )


def test_another_dtype_is_refused(refused):
    assert refused("--dtype", "int8").startswith("argument --dtype: invalid choice: 'int8'")


def copied(files, source, destination, **changes):
    """A copy of a checkpoint or of data, its JSON changed."""
    destination.mkdir()
    for file in (files / source).iterdir():
        (destination / file.name).write_bytes(file.read_bytes())
    file = destination / ("manifest.json" if source == "data" else "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return destination


def test_a_draft_with_a_head_of_its_own_is_refused(refused, files, tmp_path):
    theirs = convert.load_draft(str(files / "draft")).config
    config = dataclasses.replace(theirs, own_vocabulary=theirs.vocab_size)
    publish(tmp_path / "own", config, random_params(config), None)
    assert refused(draft=tmp_path / "own").startswith(f"--draft {tmp_path / 'own'}: it has a head of its own, and ")


def test_a_draft_of_another_target_is_refused(refused, files, tmp_path):
    other = copied(files, "draft", tmp_path / "other", num_target_layers=9)
    assert refused(draft=other) == (
        f"--draft {other}: not a draft for this target: num_target_layers: the draft was made for 9 layers, "
        "the target has 4"
    )


def test_data_of_another_tokenizer_is_refused(refused, files, tmp_path):
    other = copied(files, "data", tmp_path / "other", tokenizer_hash="0")
    assert refused(data=other).startswith(f"--data {other}: prepared with the tokenizer of ")
    assert refused(data=tmp_path / "absent").startswith(f"{tmp_path / 'absent'}: no such directory")


def test_data_longer_than_the_target_reads_is_refused(refused, files, tmp_path):
    short = copied(files, "target", tmp_path / "short", max_position_embeddings=12)
    assert refused(target=short) == f"--data {files / 'data'}: a document of 13 tokens; the target ends at 12"


def test_what_is_missing_is_told_in_one_line():
    with pytest.raises(UserError, match=r"^the following arguments are required: --draft, --data"):
        evaluate.main([])
