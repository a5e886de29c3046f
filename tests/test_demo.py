import pytest

from convert.demo_target import find_demo_target
from dflash_jax.errors import UserError
from inference import demo
from inference.engine import Generation, SamplingConfig


@pytest.fixture
def target():
    try:
        return find_demo_target()
    except UserError as absent:
        pytest.skip(str(absent))


def generation(ids, blocks=(), seconds=1.0):
    return Generation(list(ids), [False] * len(ids), list(blocks), "length", 0.1, seconds)


def test_the_draft_lies_beside_the_code_with_its_card():
    assert {"README.md", "config.json", "model.safetensors"} <= {file.name for file in demo.DEMO_DRAFT.iterdir()}


def test_the_first_difference_is_found_also_where_one_answer_ends():
    assert demo.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert demo.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert demo.first_difference([1, 2], [1, 2, 3]) == demo.first_difference([1, 2, 3], [1, 2]) == 2


def test_whether_answers_are_the_same_is_told_and_where_they_are_not():
    one = [generation([1, 2]), generation([3, 4, 5])]
    assert demo.sameness(one, one) == "With and without the draft, all 5 tokens of the 2 answers are the same."
    other = [generation([1, 9]), generation([3, 4])]
    assert demo.sameness(one, other) == (
        "With and without the draft, the answers differ: answer 1 from token 2; answer 2 from token 3."
    )


def test_the_comparison_adds_up_all_answers():
    drafted = [generation(range(7), [4, 2], 0.5), generation(range(5), [3, 1], 0.5)]
    plain = [generation(range(7), [1] * 6, 0.8), generation(range(5), [1] * 4, 0.7)]
    assert demo.compare(demo.Pace.of(drafted), demo.Pace.of(plain)) == (
        "6.7 tokens/s without the draft, 10.0 with it, speedup 1.50: a block brings 2.50 tokens "
        "(its acceptance length) and takes the time of 1.67."
    )


def test_the_demo_pair_answers_alike_with_and_without_the_draft(target, capsys):
    demo.run(demo.QUESTIONS[:1], SamplingConfig(max_new_tokens=24))
    out = capsys.readouterr().out
    assert f"> {demo.QUESTIONS[0]}\n" in out
    assert "all 24 tokens of the 1 answers are the same." in out
    assert "speedup" in out.splitlines()[-1]
