import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.block_sizes import (
    FIRST_CHANCE,
    FIRST_TRIES,
    KEPT,
    KEPT_IDLE,
    Acceptance,
    candidates,
    expected,
    fastest,
    observe,
)

RUNS = jnp.asarray([True])


def nothing(slots=7, rows=1):
    return Acceptance(jnp.zeros((rows, slots)), jnp.zeros((rows, slots)))


def after(*blocks, slots=7):
    """What is known after blocks of (size, accepted drafts)."""
    seen = nothing(slots)
    for size, count in blocks:
        seen = observe(seen, size, jnp.asarray([count]), RUNS)
    return seen


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(2, (1, 2)), (3, (1, 3)), (4, (1, 2, 4)), (8, (1, 2, 4, 8)), (10, (1, 2, 5, 10)), (16, (1, 4, 8, 16))],
)
def test_a_few_sizes_are_compiled(largest, sizes):
    assert candidates(largest) == sizes


@pytest.mark.parametrize(
    ("size", "count", "tried", "accepted"),
    [
        (8, 0, [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
        (8, 2, [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]),
        (8, 7, [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]),
        (4, 3, [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]),  # accepted whole: at least three
        (4, 2, [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]),
        (1, 0, [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_slot_is_judged_when_all_before_it_were_accepted(size, count, tried, accepted):
    seen = after((size, count))
    assert seen.tried.tolist() == [tried]
    assert seen.accepted.tolist() == [accepted]


def test_what_is_old_weighs_less_and_rows_that_ended_learn_nothing():
    seen = after((4, 1), (4, 0), slots=3)
    np.testing.assert_allclose(seen.tried, [[1 + KEPT, KEPT_IDLE, 0]])  # the second time, slot 2 was not judged
    np.testing.assert_allclose(seen.accepted, [[KEPT, 0, 0]])
    still = observe(seen, 4, jnp.asarray([3]), jnp.asarray([False]))
    np.testing.assert_array_equal(still.tried, seen.tried)


def test_what_a_block_should_bring():
    # Slot 1: judged twice, one right; slot 2, judged once and missed; slot 3 as slot 2.
    seen = Acceptance(jnp.asarray([[2.0, 1.0, 0.0]]), jnp.asarray([[1.0, 0.0, 0.0]]))
    one = (1 + FIRST_TRIES * FIRST_CHANCE) / (2 + FIRST_TRIES)
    two = FIRST_TRIES * one / (1 + FIRST_TRIES)
    brought = [1, 1 + one, 1 + one + one * two + one * two * two]
    np.testing.assert_allclose(expected(seen, (1, 2, 4)), [brought], rtol=1e-6)
    first = FIRST_CHANCE
    np.testing.assert_allclose(expected(nothing(3), (1, 2, 4)), [[1, 1 + first, 1 + first + first**2 + first**3]])


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 7)), max_size=30))
def test_a_longer_block_brings_no_less_and_never_more_than_it_holds(blocks):
    seen = after(*((size, min(count, size - 1)) for size, count in blocks))
    brought = np.asarray(expected(seen, (1, 2, 4, 8)))[0]
    assert brought[0] == 1
    assert (np.diff(brought) >= 0).all()
    assert (brought <= np.asarray([1, 2, 4, 8]) + 1e-5).all()


@pytest.mark.parametrize(
    ("blocks", "costs", "size"),
    [
        ([], [1, 1.2, 1.5, 2.2], 4),
        ([(8, 0)] * 99, [1, 1.2, 1.5, 2.2], 1),  # a draft that misses
        ([(8, 0)] * 99 + [(1, 0)] * 2000, [1, 1.2, 1.5, 2.2], 2),  # and is given another chance, a small one
        ([(8, 7)] * 30, [1, 1.2, 1.5, 2.2], 8),
        ([(8, 1), (8, 2)] * 5, [1, 1.2, 1.5, 2.2], 4),
        ([(8, 0)] * 5, [1, 1, 1, 1], 8),  # where length costs nothing, hope is free
        ([(8, 7)] * 5, [np.inf, np.inf, 1, np.inf], 4),
        ([(4, 3)] * 30, [1, 1.2, 1.5, 2.2], 8),  # whole blocks say that longer ones may do
    ],
)
def test_the_size_that_brings_most_a_second_is_taken(blocks, costs, size):
    sizes = (1, 2, 4, 8)
    assert sizes[int(fastest(after(*blocks), RUNS, sizes, jnp.asarray(costs)))] == size


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("costs", [[1, 1.6, 1.7, 2.1], [1, 1.25, 1.28, 1.35]], ids=["CPU", "accelerator"])
def test_the_choice_costs_little(chance, costs):
    sizes, blocks = (1, 2, 4, 8), 3000
    brought = [sum(chance**slot for slot in range(size)) for size in sizes]
    best = max(tokens / cost for tokens, cost in zip(brought, costs, strict=True))
    misses = np.random.default_rng(0).random((blocks, 7)) >= chance
    would = jnp.asarray(np.where(misses.any(axis=1), misses.argmax(axis=1), 7))  # drafts of each block that are right

    def block(i, told):
        seen, tokens, seconds = told
        place = fastest(seen, RUNS, sizes, jnp.asarray(costs))
        count = jnp.minimum(would[i], jnp.asarray(sizes)[place] - 1)
        after_each = [observe(seen, size, count[None], RUNS) for size in sizes]
        seen = jax.tree.map(lambda *all_: jnp.stack(all_)[place], *after_each)
        return seen, tokens + 1 + count, seconds + jnp.asarray(costs)[place]

    _, tokens, seconds = jax.lax.fori_loop(0, blocks, block, (nothing(), 0, 0.0))
    assert tokens / seconds >= 0.97 * best


def test_rows_that_run_decide_together():
    seen = Acceptance(jnp.asarray([[9.0] * 7] * 3), jnp.asarray([[9.0] * 7, [0.0] * 7, [0.0] * 7]))
    sizes, costs = (1, 8), jnp.asarray([1.0, 4.0])
    runs = jnp.asarray
    assert fastest(seen, runs([True, False, False]), sizes, costs) == 1
    assert fastest(seen, runs([False, True, True]), sizes, costs) == 0
    assert fastest(seen, runs([True, True, True]), sizes, costs) == 0  # 8 and 1 and 1, for four times the price
