import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_jax.sampling import Policy, choose, filtered, likeliest

LOGITS = jnp.log(jnp.asarray([0.10, 0.40, 0.05, 0.25, 0.20]))[None, None]


def policy(temperature=1.0, top_k=0, top_p=1.0, seed=0, request=0, rows=1):
    def fill(value, dtype):
        return jnp.full(rows, value, dtype)

    return Policy(
        temperature=fill(temperature, jnp.float32),
        top_k=fill(top_k, jnp.int32),
        top_p=fill(top_p, jnp.float32),
        seed=fill(seed, jnp.uint32),
        request=fill(request, jnp.uint32),
    )


def law(**options):
    chances = jnp.exp(filtered(LOGITS, policy(**options))[0, 0])
    return {token: round(float(p), 6) for token, p in enumerate(chances) if p > 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {1: 0.4, 3: 0.25, 4: 0.2, 0: 0.1, 2: 0.05}),
        ({"top_k": 2}, {1: 0.615385, 3: 0.384615}),
        ({"top_k": 9}, {1: 0.4, 3: 0.25, 4: 0.2, 0: 0.1, 2: 0.05}),
        ({"top_p": 0.65}, {1: 0.4 / 0.65, 3: 0.25 / 0.65}),  # 0.4 + 0.25 reaches it exactly
        ({"top_p": 0.66}, {1: 0.470588, 3: 0.294118, 4: 0.235294}),  # the token that crosses is kept
        ({"top_p": 0.01}, {1: 1.0}),
        ({"top_p": 1e-40}, {1: 1.0}),
        ({"top_k": 3, "top_p": 0.5}, {1: 0.615385, 3: 0.384615}),
        ({"top_k": 3, "top_p": 0.45}, {1: 1.0}),  # top-p counts what top-k left, of which token 1 is 0.47 and not 0.4
        ({"temperature": 0.5}, {1: 0.581818, 3: 0.227273, 4: 0.145455, 0: 0.036364, 2: 0.009091}),
        ({"temperature": 0.5, "top_p": 0.7}, {1: 0.719101, 3: 0.280899}),  # temperature comes first
    ],
)
def test_filters_leave_the_law_written_down(options, expected):
    found = law(**options)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=2e-6)


@given(
    values=st.lists(st.sampled_from([-8.0, -1.5, -0.25, 0.0, 1e-30, 2.0, 3.25, 60.0]), min_size=9, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
)
def test_filters_keep_what_a_sort_would(values, temperature, top_k, top_p):
    scores = np.asarray(values, np.float32) / np.float32(temperature)
    kept = scores >= np.sort(scores)[::-1][min(top_k or 9, 9) - 1]
    weights = np.where(kept, np.exp(scores - scores.max(), dtype=np.float64), 0)
    weights /= weights.sum()
    heavier = (weights[None] * (scores[None] > scores[:, None])).sum(axis=1)
    assume(np.abs(heavier - top_p).min() > 1e-5)
    kept &= (heavier < top_p) | (top_p == 1)
    found = filtered(jnp.asarray(values)[None, None], policy(temperature, top_k, top_p))
    assert (np.asarray(found[0, 0]) > -np.inf).tolist() == kept.tolist()


@given(
    values=st.lists(st.sampled_from([-jnp.inf, -1.5, 0.0, 2.0, 3.25]), min_size=6, max_size=6).filter(
        lambda row: max(row) > -jnp.inf
    )
)
def test_the_likeliest_is_the_first_of_the_highest(values):
    logits = jnp.asarray(values).reshape(1, 2, 3)
    assert likeliest(logits).tolist() == np.argmax(np.asarray(logits), axis=-1).tolist()


def test_temperature_zero_is_the_argmax():
    assert choose(LOGITS, jnp.zeros((1, 1), jnp.int32), policy(temperature=0.0)).tolist() == [[1]]


def test_a_greedy_row_beside_a_sampling_one_stays_greedy():
    mixed = policy(rows=2)._replace(temperature=jnp.asarray([0.0, 5.0]))
    positions = jnp.arange(200, dtype=jnp.int32)[None].repeat(2, 0)
    tokens = choose(jnp.broadcast_to(LOGITS, (2, 200, 5)), positions, mixed)
    assert set(tokens[0].tolist()) == {1}
    assert len(set(tokens[1].tolist())) == 5


def test_samples_follow_the_law_and_never_leave_the_filters():
    count = 20_000
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    tokens = choose(jnp.broadcast_to(LOGITS, (1, count, 5)), positions, policy(top_k=3, top_p=0.9))
    frequency = np.bincount(np.asarray(tokens[0]), minlength=5) / count
    expected = np.asarray([0, 0.470588, 0, 0.294118, 0.235294])
    assert frequency[0] == frequency[2] == 0
    assert np.abs(frequency - expected).sum() / 2 < 0.01


def test_rare_tokens_come_as_often_as_they_should():
    rare, count = 20_000, 1000
    logits = jnp.concatenate([jnp.asarray([0.0]), jnp.full(rare, jnp.log(0.01 / 0.99 / rare))])  # 5e-7 each
    tokens = jax.jit(lambda at: choose(jnp.broadcast_to(logits, (1, count, rare + 1)), at[None], policy()))
    found = sum(int((tokens(jnp.arange(i * count, (i + 1) * count)) > 0).sum()) for i in range(10))
    assert 70 <= found <= 130  # 100 are expected, and ten are its deviation


def test_zeros_of_both_signs_are_as_likely():
    assert np.isfinite(filtered(jnp.asarray([[[0.0, -0.0, -1.0]]]), policy(top_k=1))).tolist() == [
        [[True, True, False]]
    ]


def test_a_choice_depends_on_seed_request_and_position_alone():
    logits = jnp.broadcast_to(LOGITS, (1, 64, 5))
    positions = jnp.arange(64, dtype=jnp.int32)[None]
    whole = choose(logits, positions, policy(seed=3, request=2))
    pieces = [choose(logits[:, :7], positions[:, i : i + 7], policy(seed=3, request=2)) for i in range(0, 56, 7)]
    assert jnp.concatenate(pieces, axis=1).tolist() == whole[:, :56].tolist()
    others = [policy(seed=4, request=2), policy(seed=3, request=1)]
    assert all(choose(logits, positions, other).tolist() != whole.tolist() for other in others)
    assert choose(logits, positions + 1, policy(seed=3, request=2)).tolist() != whole.tolist()


def test_rows_do_not_depend_on_their_neighbours():
    logits = jax.random.normal(jax.random.key(0), (3, 16, 5))
    positions = jnp.arange(16, dtype=jnp.int32)[None].repeat(3, 0)
    together = choose(logits, positions, policy(rows=3)._replace(request=jnp.arange(3, dtype=jnp.uint32)))
    alone = choose(logits[1:2], positions[:1], policy(request=1))
    assert together[1].tolist() == alone[0].tolist()
