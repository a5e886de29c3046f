"""The step against the laws, and against training without any of its machinery (`tests/dense.py`)."""

import dataclasses
import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.anchors import Anchors, candidates, draw, label
from dflash_jax.config import LayerConfig
from dflash_jax.loss import Sums
from dflash_jax.reading import stack
from tests import dense, tiny
from tests.torch_models import random_params
from training import step
from training.config import OptimizerConfig
from training.evaluation import judge
from training.initial import first_state
from training.step import Batch, Task, draft_blocks, loss_and_gradients, read_target, train_step

TARGET, DRAFT = tiny.TARGET, tiny.DRAFT
T, GAMMA, M, S = DRAFT.block_size, 4.0, 6, 40
NO_SIGNAL = jnp.zeros(1, jnp.int32)
TARGET_PARAMS, DRAFT_PARAMS = random_params(TARGET, 0), random_params(DRAFT, 1)
# Layers one by one, as the oracle takes them, and in stacks.
TARGET_PARAMS |= stack(
    sharding.make_mesh(), TARGET, DRAFT.target_layer_ids, jax.tree.map(jnp.array, TARGET_PARAMS), through=True
)
TASK = Task(
    TARGET, DRAFT, M, "decay", GAMMA, "float32", False, OptimizerConfig(learning_rate=1e-2), 30, sharding.make_mesh()
)


@pytest.fixture(autouse=True)
def _few_logits(monkeypatch):
    """Three pieces."""
    monkeypatch.setattr(step, "MOST_LOGITS", 2 * 2 * (T - 1) * TARGET.vocab_size)
    monkeypatch.setattr(step, "FEWEST_SLOTS", 1)


def packed(seed=0):
    """Two rows: three documents and two."""
    rng = np.random.default_rng(seed)
    starts = np.zeros((2, S), np.int32)
    starts[0, 17:], starts[0, 30:], starts[1, 25:] = 17, 30, 25
    supervised = rng.random((2, S)) < 0.8
    return Batch(
        jnp.asarray(rng.integers(0, TARGET.vocab_size, (2, S)), jnp.int32), jnp.asarray(supervised), jnp.asarray(starts)
    )


@functools.cache
def read(task=TASK, seed=0):
    return read_target(task, TARGET_PARAMS, packed(seed))


def some_anchors(batch, seed=1, count=M):
    return draw(jax.random.key(seed), candidates(batch.supervised, batch.starts), count)


# Rounded as users' programs are.
run = jax.jit(loss_and_gradients, static_argnums=0, compiler_options={"xla_backend_optimization_level": 3})
blocks = jax.jit(draft_blocks, static_argnums=0)


EVERY = range(TARGET.vocab_size)


def oracle(task, batch, anchors, params, tokens_scored=EVERY):
    """The loss with every logit of some tokens at once, slot by slot."""
    part, place = jnp.asarray(tokens_scored), {token: row for row, token in enumerate(tokens_scored)}
    total, weight = jnp.zeros(()), jnp.zeros(())
    tokens, supervised, starts = (np.asarray(x) for x in batch[:3])
    for row in range(len(tokens)):
        outputs = dense.target_outputs(task.target, TARGET_PARAMS, tokens[row], starts[row])
        features = jnp.concatenate([outputs[i] for i in task.draft.target_layer_ids], axis=-1)
        rows = [int(a) for a, valid in zip(anchors.positions[row], anchors.valid[row], strict=True) if valid]
        states = dense.draft_states(
            task.draft, params, TARGET_PARAMS["embedding"], tokens[row], starts[row], features, rows
        )
        said = jax.nn.log_softmax(dense.head(task.target, TARGET_PARAMS, states)[:, part]).reshape(len(rows), T, -1)
        taught = jax.nn.log_softmax(dense.head(task.target, TARGET_PARAMS, outputs[-1])[:, part])
        for block, a in enumerate(rows):
            known = supervised[row] & np.isin(tokens[row], tokens_scored)  # what is not scored is as if unsupervised
            slots = [k for k, right in enumerate(dense.weighted(known, starts[row], a, T), 1) if right]
            labels = {k: place[int(tokens[row, a + k])] for k in slots}
            chances = [jnp.exp(jax.lax.stop_gradient(said[block, k, labels[k]])) for k in slots]
            reached = jnp.cumprod(jnp.stack([0.5 * q + 0.5 for q in chances])) if slots else jnp.zeros(0)
            for k in slots:
                log_q, p = said[block, k], jnp.exp(taught[a + k - 1])
                entropy, kl = -log_q[labels[k]], (p * (jnp.log(p) - log_q)).sum()
                accepted = jnp.minimum(p, jnp.exp(log_q)).sum()
                mixed = jax.lax.stop_gradient(jnp.exp(-3 * accepted))
                value = {"decay": entropy, "dpace": entropy, "kl": kl, "lk": mixed * kl + (1 - mixed) * (1 - accepted)}
                w = reached[k - 1 :].sum() if task.loss == "dpace" else np.exp(-(k - 1) / GAMMA)
                total, weight = total + w * value[task.loss], weight + w
    return total / weight


@pytest.mark.parametrize("loss", ["decay", "dpace", "kl", "lk"])
def test_loss_and_gradients_are_those_of_dense_masks_and_full_logits(loss):
    task = dataclasses.replace(TASK, loss=loss)
    batch = read(task)
    anchors = some_anchors(batch)
    sums, gradients = run(task, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors)
    value, theirs = jax.value_and_grad(lambda params: oracle(task, batch, anchors, params))(DRAFT_PARAMS)
    np.testing.assert_allclose(sums.loss / sums.weight, value, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), gradients, theirs)


def with_part(tokens):
    """The target's weights, and a head that scores only some tokens beside them."""
    rows = np.full(TARGET.vocab_size, len(tokens), np.int32)
    rows[list(tokens)] = np.arange(len(tokens))
    return TARGET_PARAMS | {
        step.SCORED: {"head": TARGET_PARAMS["head"][:, jnp.asarray(tokens)], "rows": jnp.asarray(rows)}
    }


SOME = (0, 2, 3, 4, 6, 7, 8, 9)


@pytest.mark.parametrize("loss", ["decay", "kl"])
def test_a_loss_of_some_tokens_is_that_of_their_logits_alone(loss, monkeypatch):
    cut = Mock(side_effect=step.cut_blocks)
    monkeypatch.setattr(step, "cut_blocks", cut)
    task = dataclasses.replace(TASK, loss=loss)
    batch = read(task)
    anchors = some_anchors(batch)
    sums, gradients = run(task, with_part(SOME), DRAFT_PARAMS, batch, anchors)
    assert [call.args[-1] for call in cut.call_args_list] == [len(SOME)]  # that many logits a slot exist at once
    value, theirs = jax.value_and_grad(lambda params: oracle(task, batch, anchors, params, SOME))(DRAFT_PARAMS)
    np.testing.assert_allclose(sums.loss / sums.weight, value, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), gradients, theirs)


def test_a_loss_of_every_token_is_the_loss():
    batch = read()
    anchors = some_anchors(batch)
    of_all, as_ever = (
        run(TASK, weights, DRAFT_PARAMS, batch, anchors) for weights in (with_part(EVERY), TARGET_PARAMS)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-6), of_all, as_ever)


def test_a_teacher_is_the_targets_whatever_the_draft_does_to_its_logits():
    task = dataclasses.replace(TASK, loss="kl")
    adjusted = dataclasses.replace(DRAFT, output_multiplier=0.5, final_logit_softcapping=2.0)
    batch = read(task)
    anchors = some_anchors(batch)
    states = blocks(task, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors)
    plain, odd = (
        step.block_slots(one, TARGET_PARAMS, batch, anchors, states)
        for one in (task, dataclasses.replace(task, draft=adjusted))
    )
    np.testing.assert_array_equal(plain.teacher, odd.teacher)
    assert not np.allclose(plain.logits, odd.logits)


def test_what_the_loss_scores_is_nothing_to_evaluation():
    batch = read()
    anchors = some_anchors(batch)
    programs = {
        judge.lower(TASK, weights, DRAFT_PARAMS, batch, anchors).as_text()
        for weights in (with_part(SOME), TARGET_PARAMS)
    }
    assert len(programs) == 1


def test_rematerialisation_changes_only_the_rounding():
    batch, task = read(), dataclasses.replace(TASK, remat=True)
    anchors = some_anchors(batch)
    kept, again = (run(t, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors) for t in (TASK, task))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), kept, again)


def test_features_are_the_targets_as_the_dense_mask_has_them():
    batch = read(dataclasses.replace(TASK, loss="kl"))
    for row in range(2):
        outputs = dense.target_outputs(
            TARGET, TARGET_PARAMS, np.asarray(batch.tokens[row]), np.asarray(batch.starts[row])
        )
        np.testing.assert_allclose(batch.features[row], jnp.concatenate([outputs[0], outputs[2]], axis=-1), atol=2e-5)
        np.testing.assert_allclose(batch.hidden[row], outputs[-1], atol=2e-5)


def test_a_target_with_windows_is_read_through_them():
    target = dataclasses.replace(TARGET, layers=(LayerConfig(tiny.ROTARY, window=5),) * 4)
    batch = read_target(dataclasses.replace(TASK, target=target), TARGET_PARAMS, packed())
    outputs = dense.target_outputs(target, TARGET_PARAMS, np.asarray(batch.tokens[0]), np.asarray(batch.starts[0]))
    np.testing.assert_allclose(batch.features[0, :, :16], outputs[0], atol=2e-5)


def test_features_at_or_after_an_anchor_get_no_gradient_and_change_nothing():
    batch = read()
    anchors = Anchors(jnp.asarray([[20], [10]], jnp.int32), jnp.asarray([[True], [True]]))
    task = dataclasses.replace(TASK, anchors=1)

    def energy(features):
        return jnp.square(
            draft_blocks(task, TARGET_PARAMS, DRAFT_PARAMS, batch._replace(features=features), anchors)
        ).sum()

    gradient = jax.jit(jax.grad(energy))(batch.features)
    seen = np.abs(np.asarray(gradient)).sum(-1) > 0
    assert np.flatnonzero(seen[0]).tolist() == [17, 18, 19]  # its document's, strictly before it
    assert np.flatnonzero(seen[1]).tolist() == list(range(10))
    changed = batch._replace(features=batch.features.at[0, 20:].add(100.0).at[1, 10:].add(100.0))
    assert (
        blocks(task, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors)
        == blocks(task, TARGET_PARAMS, DRAFT_PARAMS, changed, anchors)
    ).all()


def test_another_anchor_changes_no_state_of_the_first():
    batch = read()
    rows = jnp.asarray([[20, 22], [10, 11]], jnp.int32)
    both, alone = jnp.ones((2, 2), bool), jnp.asarray([[True, False]] * 2)
    two = blocks(TASK, TARGET_PARAMS, DRAFT_PARAMS, batch, Anchors(rows, both))
    one = blocks(TASK, TARGET_PARAMS, DRAFT_PARAMS, batch, Anchors(rows, alone))
    assert (two[:, 0] == one[:, 0]).all()


def test_slots_see_one_another_both_ways():
    """In a full layer slot 1 reads what stands in the last slot; SpecForge 427 had it causal."""
    batch = read()
    anchors = Anchors(jnp.asarray([[20], [10]], jnp.int32), jnp.ones((2, 1), bool))
    full = dataclasses.replace(TASK, draft=dataclasses.replace(DRAFT, layers=(DRAFT.layers[0],)))

    within = dataclasses.replace(DRAFT.layers[0], causal=True)
    causal = dataclasses.replace(full, draft=dataclasses.replace(DRAFT, layers=(within,)))
    states = [blocks(task, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors) for task in (full, causal)]
    assert not np.allclose(states[0][:, :, 1], states[1][:, :, 1])


@pytest.mark.parametrize(("first", "last"), [(0, 17), (17, 30), (30, S)])
def test_a_packed_document_does_not_depend_on_its_neighbours_to_the_bit(first, last):
    """The first of a row sees no other anyway; and answers end where documents do, or no label could be another's."""
    batch, at = packed()._replace(supervised=jnp.ones((2, S), bool)), jnp.arange(S)[None]
    inside = (at >= first) & (at < last)
    other = batch._replace(tokens=jnp.where(inside, batch.tokens, (batch.tokens + 3) % TARGET.vocab_size))
    # Wherever blocks may stand in the document; one program for all.
    rows = np.flatnonzero(candidates(batch.supervised, batch.starts)[0] & inside[0])
    places = np.pad(rows, (0, 16 - len(rows)))
    valid = np.arange(16) < len(rows)
    anchors = Anchors(jnp.asarray([places] * 2, jnp.int32), jnp.asarray([valid, np.zeros(16, bool)]))

    def losses(batch):
        return run(TASK, TARGET_PARAMS, DRAFT_PARAMS, read_target(TASK, TARGET_PARAMS, batch), anchors)

    one, two = losses(batch), losses(other)
    assert one[0].blocks == last - first - 1
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), one, two)))


def test_packed_documents_add_up_to_what_they_give_alone():
    # Blocks at 14 and 27 would reach over their documents' ends.
    batch = read_target(TASK, TARGET_PARAMS, packed()._replace(supervised=jnp.ones((2, S), bool)))
    anchors = Anchors(jnp.asarray([[2, 14, 27, 31]] * 2, jnp.int32), jnp.asarray([[True] * 4, [False] * 4]))
    together, _ = run(TASK, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors)
    total = 0.0
    for first, last, rows in ((0, 17, [2, 14]), (17, 30, [27]), (30, 40, [31])):
        alone = Batch(
            jnp.pad(batch.tokens[:1, first:last], ((0, 0), (0, S - last + first))),
            jnp.pad(batch.supervised[:1, first:last], ((0, 0), (0, S - last + first))),
            jnp.where(jnp.arange(S) < last - first, 0, last - first)[None].astype(jnp.int32),
        )
        at = Anchors(jnp.asarray([[row - first for row in rows]], jnp.int32), jnp.ones((1, len(rows)), bool))
        total += run(TASK, TARGET_PARAMS, DRAFT_PARAMS, read_target(TASK, TARGET_PARAMS, alone), at)[0].loss
    np.testing.assert_allclose(together.loss, total, rtol=1e-5)


def start():
    params = jax.tree.map(jnp.array, DRAFT_PARAMS)  # the step takes its state over
    # Placed as the step leaves it, or the second step would be compiled anew.
    return first_state(TASK, sharding.put_params(TASK.mesh, params))


def take(state, batch, task=TASK, seed=0):
    return train_step(task, TARGET_PARAMS, state, batch, jnp.uint32(seed), NO_SIGNAL)


def test_steps_lower_the_loss():
    state, losses = start(), []
    for _ in range(30):
        state, report = take(state, packed())
        losses.append(float(report.sums.loss / report.sums.weight))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_a_batch_without_an_anchor_counts_and_changes_nothing():
    batch = packed()._replace(supervised=jnp.zeros((2, S), bool))
    state, report = take(start(), batch)
    assert (int(state.step), bool(report.applied), float(report.sums.loss)) == (1, False, 0.0)
    assert np.isfinite(report.grad_norm)
    same = jax.tree.map(lambda one, other: bool((one == other).all()), state[1:], start()[1:])
    assert all(jax.tree.leaves(same))


def test_a_loss_that_is_not_finite_changes_no_parameter():
    broken = TARGET_PARAMS | {"embedding": TARGET_PARAMS["embedding"].at[3].set(jnp.nan)}
    state, report = train_step(TASK, broken, start(), packed(), jnp.uint32(0), NO_SIGNAL)
    assert not np.isfinite(report.sums.loss)
    assert not report.applied
    assert all(jax.tree.leaves(jax.tree.map(lambda one, other: bool((one == other).all()), state.params, DRAFT_PARAMS)))


def test_gradients_that_are_not_finite_change_no_parameter(monkeypatch):
    def burst(task, target, params, batch, anchors):
        one, slots = jnp.ones(()), jnp.ones(T - 1)
        return Sums(one, one, slots, slots, one, one), jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), params)

    monkeypatch.setattr(step, "loss_and_gradients", burst)
    state, report = take(start(), packed(), dataclasses.replace(TASK, steps=31))  # traced anew
    assert np.isfinite(report.sums.loss)
    assert not report.applied
    assert all(jax.tree.leaves(jax.tree.map(lambda one, other: bool((one == other).all()), state.params, DRAFT_PARAMS)))


def test_anchors_follow_from_seed_and_step_and_are_others_each_step():
    seen = []
    for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        state = start()
        state = state._replace(step=jax.device_put(np.int32(number), state.step.sharding))
        seen.append(float(take(state, packed(), seed=seed)[1].sums.loss))
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3


def test_bfloat16_computes_what_float32_keeps():
    """300 steps at the paper's rate; z-lab 115 saw a norm become NaN at step 240."""
    task = dataclasses.replace(TASK, dtype="bfloat16", optimizer=OptimizerConfig(), steps=300)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET_PARAMS)
    state = start()
    for _ in range(300):
        state, report = train_step(task, half, state, packed(), jnp.uint32(0), NO_SIGNAL)
    assert np.isfinite(report.sums.loss)
    kept = [leaf for leaf in jax.tree.leaves((state.params, state.moments)) if leaf.ndim]
    assert all(leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all() for leaf in kept)


def test_bfloat16_gradients_are_those_of_float32_but_for_their_rounding():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET_PARAMS)
    batch = read()
    anchors = some_anchors(batch)
    sums, gradients = run(TASK, TARGET_PARAMS, DRAFT_PARAMS, batch, anchors)
    narrow, rounded = run(dataclasses.replace(TASK, dtype="bfloat16"), half, DRAFT_PARAMS, batch, anchors)
    np.testing.assert_allclose(narrow.loss, sums.loss, rtol=5e-3)
    for one, other in zip(jax.tree.leaves(rounded), jax.tree.leaves(gradients), strict=True):
        assert one.dtype == jnp.float32
        assert jnp.linalg.norm(one - other) < 0.2 * jnp.linalg.norm(other)  # 0.12 as measured


def test_logits_are_float32_and_the_head_is_multiplied_as_it_lies():
    task = dataclasses.replace(TASK, dtype="bfloat16")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET_PARAMS)
    batch = read()
    anchors = some_anchors(batch)
    outputs = blocks(task, half, DRAFT_PARAMS, batch, anchors)
    slots = step.block_slots(task, half, batch, anchors, outputs)
    assert slots.logits.dtype == jnp.float32
    assert (slots.logits != slots.logits.astype(jnp.bfloat16)).any()
    text = run.lower(task, half, DRAFT_PARAMS, batch, anchors).as_text()
    # The head, its transpose and what is made of them.
    assert f"tensor<16x{TARGET.vocab_size}xbf16>" in text
    assert f"tensor<16x{TARGET.vocab_size}xf32>" not in text


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizers_take_the_gradients_they_get(name):
    task = dataclasses.replace(TASK, optimizer=dataclasses.replace(TASK.optimizer, name=name))
    params = jax.tree.map(jnp.array, DRAFT_PARAMS)
    state = first_state(task, params)
    state, report = take(state, packed(), task)
    moved = jax.tree.map(lambda one, other: float(abs(one - other).max()), state.params, DRAFT_PARAMS)
    assert report.applied
    assert all(0 < size < 0.1 for size in jax.tree.leaves(moved))


def test_labels_of_decoding_and_training_are_one():
    """Slot k speaks for the position k after the anchor; SpecForge 455 had it one later."""
    batch = read()
    labels = label(
        batch.tokens,
        batch.supervised,
        batch.starts,
        Anchors(jnp.asarray([[20]] * 2, jnp.int32), jnp.ones((2, 1), bool)),
        T,
    )
    assert labels.tokens[0, 0].tolist() == batch.tokens[0, 21 : 20 + T].tolist()
