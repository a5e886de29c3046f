"""Losses of one block, against their formulas spelled out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.loss import LOSSES, Slots, default_gamma, sums

VOCABULARY = 5


def slots(seed=0, weighted=(1, 1, 1, 0)):
    rng = np.random.default_rng(seed)
    logits, teacher = rng.standard_normal((2, 1, len(weighted), VOCABULARY)).astype(np.float32) * 2
    tokens = rng.integers(0, VOCABULARY, (1, len(weighted)))
    return Slots(
        jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), jnp.asarray([weighted], bool), jnp.asarray(teacher)
    )


def probabilities(logits):
    exponentials = np.exp(np.asarray(logits, np.float64)[0])
    return exponentials / exponentials.sum(-1, keepdims=True)


def said(block):
    """The draft's probability of what stands in each slot."""
    return probabilities(block.logits)[np.arange(len(block.tokens[0])), np.asarray(block.tokens[0])]


def check(name, block, losses, weights):
    ours = LOSSES[name](block, 3.0)
    counted = np.flatnonzero(block.weighted[0])
    np.testing.assert_allclose(ours[0][0][counted], np.asarray(losses)[counted], rtol=1e-5)
    np.testing.assert_allclose(ours[1][0], weights, rtol=1e-5)


def test_the_papers_loss_counts_later_slots_less():
    block = slots()
    check("decay", block, -np.log(said(block)), [1, np.exp(-1 / 3), np.exp(-2 / 3), 0])


def test_dpace_counts_what_a_slot_adds_to_the_expected_acceptance():
    block = slots()
    one, two, three = (0.5 * q + 0.5 for q in said(block)[:3])
    survival = np.array([one, one * two, one * two * three])
    check("dpace", block, -np.log(said(block)), [survival.sum(), survival[1:].sum(), survival[2], 0])


def test_dpace_is_the_gradient_of_the_expected_acceptance():
    block = slots()

    def acceptance(logs):
        return jnp.cumprod(jnp.exp(logs)[:3]).sum()

    logs = np.log(0.5 * said(block) + 0.5)
    np.testing.assert_allclose(LOSSES["dpace"](block, 3.0)[1][0], jax.grad(acceptance)(jnp.asarray(logs)), rtol=1e-5)


def test_kl_is_that_of_the_target_and_the_draft():
    block = slots()
    p, q = probabilities(block.teacher), probabilities(block.logits)
    check("kl", block, (p * np.log(p / q)).sum(-1), [1, np.exp(-1 / 3), np.exp(-2 / 3), 0])


def test_lk_turns_from_kl_to_the_acceptance():
    block = slots()
    p, q = probabilities(block.teacher), probabilities(block.logits)
    accepted = np.minimum(p, q).sum(-1)
    share = np.exp(-3 * accepted)
    losses = share * (p * np.log(p / q)).sum(-1) + (1 - share) * (1 - accepted)
    check("lk", block, losses, [1, np.exp(-1 / 3), np.exp(-2 / 3), 0])


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_goes_into_weights_or_teacher(name):
    block = slots()

    def total(logits, teacher):
        values, weights = LOSSES[name](block._replace(logits=logits, teacher=teacher), 3.0)
        return (values * weights).sum()

    def frozen(logits):
        values, _ = LOSSES[name](block._replace(logits=logits), 3.0)
        return (values * LOSSES[name](block, 3.0)[1]).sum()

    by_logits, by_teacher = jax.grad(total, argnums=(0, 1))(block.logits, block.teacher)
    assert not by_teacher.any()
    assert not by_logits[0, 3].any()
    np.testing.assert_allclose(by_logits, jax.grad(frozen)(block.logits), atol=1e-7)


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (13, 6)])
def test_gamma_follows_the_block_size(size, gamma):
    assert default_gamma(size) == gamma


def test_acceptance_is_the_leading_right_drafts_and_one_token_more():
    logits = jax.nn.one_hot(jnp.asarray([[1, 2, 3, 4], [1, 0, 3, 4], [0, 2, 3, 4]]), VOCABULARY) * 9
    tokens = jnp.asarray([[1, 2, 3, 4]] * 3, jnp.int32)
    weighted = jnp.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    found = sums(LOSSES["decay"], 4.0, Slots(logits, tokens, weighted, None))
    assert found.right.tolist() == [2, 1, 2, 1]
    assert found.counted.tolist() == [2, 2, 2, 1]
    assert (found.emitted, found.blocks) == (3 + 1 + 1 + 1, 2)


def test_a_loss_of_the_targets_logits_asks_for_them():
    with pytest.raises(ValueError, match="target's logits"):
        LOSSES["kl"](slots()._replace(teacher=None), 3.0)
