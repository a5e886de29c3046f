import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.acceptance import accepted, emission


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize(
    ("drafts", "count"),
    [((1, 2, 3), 3), ((1, 2, 9), 2), ((1, 9, 3), 1), ((9, 2, 3), 0), ((9, 9, 9), 0)],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(drafts, count):
    chosen = ints((1, 2, 3, 4))
    assert accepted(chosen, ints(drafts)).tolist() == [count]


def test_rows_are_counted_apart():
    chosen = ints((1, 2, 3), (1, 2, 3))
    assert accepted(chosen, ints((1, 2), (2, 2))).tolist() == [2, 0]


def test_a_block_without_drafts_accepts_none():
    assert accepted(ints((7,)), jnp.zeros((1, 0), jnp.int32)).tolist() == [0]


@pytest.mark.parametrize(
    ("stops", "count", "room", "expected"),
    [
        ((-1, -1), 4, 9, (4, False, False)),  # nothing ends it
        ((5, -1), 4, 9, (1, True, False)),  # a stop in the first slot
        ((7, -1), 4, 9, (3, True, False)),
        ((8, -1), 4, 9, (4, True, False)),  # a stop as the target's own token
        ((8, -1), 3, 9, (3, False, False)),  # the stop was not accepted
        ((8, 6), 4, 9, (2, True, False)),  # the earliest of several
        ((-1, -1), 4, 3, (3, False, True)),  # the cap inside a block
        ((7, -1), 4, 3, (3, True, False)),  # stop and cap at once: the stop wins
        ((8, -1), 4, 3, (3, False, True)),  # a stop past the cap is not seen
        ((-1, -1), 4, 4, (4, False, True)),
    ],
)
def test_an_answer_ends_at_the_earliest_stop_or_at_its_cap(stops, count, room, expected):
    end = emission(ints((5, 6, 7, 8)), ints(count), ints(stops), ints(room))
    assert (end.length.item(), end.stopped.item(), end.full.item()) == expected


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    stops=st.sets(st.integers(0, 5), max_size=3),
    data=st.data(),
)
def test_emission_is_the_list_cut_by_hand(tokens, stops, data):
    count, room = data.draw(st.integers(1, len(tokens))), data.draw(st.integers(1, 9))
    kept = tokens[: min(count, room)]
    at = next((i for i, token in enumerate(kept) if token in stops), None)
    length = len(kept) if at is None else at + 1
    padded = ints((*stops, *[-1] * (3 - len(stops))))
    end = emission(ints(tokens), ints(count), padded, ints(room))
    assert (end.length.item(), end.stopped.item()) == (length, at is not None)
    assert end.full.item() == (at is None and length == room)
