import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import masks
from dflash_jax.config import LayerConfig
from dflash_jax.rope import Rotary

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROTARY = Rotary(theta=1e4)
# A block of 4 whose anchor stands at 10, over a context of 10: the columns are positions 0…9, then the block's 10…13.
BLOCKS = {
    (None, False): """
        1111111111 1111
        1111111111 1111
        1111111111 1111
        1111111111 1111""",
    (None, True): """
        1111111111 1000
        1111111111 1100
        1111111111 1110
        1111111111 1111""",
    (4, True): """
        0000000111 1000
        0000000011 1100
        0000000001 1110
        0000000000 1111""",
    (4, False): """
        0000000111 1111
        0000000011 1111
        0000000001 1111
        0000000000 1111""",
    (2, False): """
        0000000001 1100
        0000000000 1110
        0000000000 0111
        0000000000 0011""",
}


def table(drawn: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in row.replace(" ", "")] for row in drawn.split("\n") if row])


@pytest.mark.parametrize(("window", "causal"), BLOCKS)
def test_what_a_block_sees(window, causal):
    layer = LayerConfig(ROTARY, window, causal)
    before = masks.context(layer, jnp.array([10]), 4, 10)
    within = masks.block(layer, 4)
    np.testing.assert_array_equal(np.concatenate([before, within], -1)[0], table(BLOCKS[window, causal]))


@pytest.mark.parametrize(("window", "causal"), BLOCKS)
def test_the_tables_are_those_of_the_published_reference(window, causal):
    reference = pytest.importorskip("dflash.model", reason="the published reference (PyPI dflash) is not installed")
    torch = pytest.importorskip("torch")
    heads = torch.zeros(1, 1, 14, 2)
    mask = reference._attention_mask(heads[:, :, -4:], heads, is_causal=causal, sliding_window=window)
    np.testing.assert_array_equal(mask[0, 0].numpy(), table(BLOCKS[window, causal]))


def test_context_at_and_after_each_row_s_anchor_is_hidden():
    seen = masks.context(LayerConfig(ROTARY, None, causal=False), jnp.array([2, 0, 5]), 2, 5)
    assert [row.astype(int).tolist() for row in np.asarray(seen)] == [
        [[1, 1, 0, 0, 0]] * 2,
        [[0, 0, 0, 0, 0]] * 2,
        [[1, 1, 1, 1, 1]] * 2,
    ]


@pytest.mark.parametrize(
    ("window", "drawn"),
    [
        (None, "11110000\n11111000\n11111100"),
        (3, "01110000\n00111000\n00011100"),
        (1, "00010000\n00001000\n00000100"),
    ],
)
def test_what_target_positions_3_to_5_see_of_a_buffer_of_8(window, drawn):
    seen = masks.cached(LayerConfig(ROTARY, window), jnp.array([3]), 3, 8)
    np.testing.assert_array_equal(seen[0], table(drawn))


def test_each_row_of_a_batch_has_its_own_start():
    seen = masks.cached(LayerConfig(ROTARY), jnp.array([0, 2]), 2, 4)
    np.testing.assert_array_equal(seen[0], table("1000\n1100"))
    np.testing.assert_array_equal(seen[1], table("1110\n1111"))


def test_positions():
    np.testing.assert_array_equal(masks.positions(jnp.array([5, 0]), 3), [[5, 6, 7], [0, 1, 2]])
