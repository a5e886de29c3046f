"""Look at what a draft reads, the outputs of its target's layers: `python examples/tap_features.py --help`.

All layers can be looked at; a draft may tap any but the last (law 1).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convert import cli, compile_cache, load_target, load_tokenizer, progress
from convert.demo_target import find_demo_target
from dflash_jax import cache
from dflash_jax.config import TargetConfig
from dflash_jax.errors import check
from dflash_jax.layers import RMSNorm
from dflash_jax.parameters import Params
from dflash_jax.sampling import likeliest
from dflash_jax.target import Target
from inference.flags import whole

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
EXAMPLE = """\
example:
  python examples/tap_features.py --taps 1 8 14 20 27 --text "One, two, three, four, five, six,"
"""


class Seen(NamedTuple):
    """What one tapped layer shows, over all positions of a text."""

    size: Float[Array, ""]
    neighbours: Float[Array, ""]
    agrees: Float[Array, ""]
    guess: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def read(
    config: TargetConfig, taps: tuple[int, ...], params: Params, tokens: Int[Array, "1 t"]
) -> tuple[Float[Array, "1 t d"], Float[Array, "1 t pd"]]:
    """Run a whole text through a target, from an empty cache; return its last hidden states and the taps' features."""
    empty = cache.empty(config, 1, tokens.shape[1] + 1, jnp.dtype("float32"))  # `cache.write` wants one row to spare
    found: Any = Target(config, taps).apply({"params": params}, tokens, empty, jnp.zeros(1, jnp.int32))
    return found[:2]


@functools.partial(jax.jit, static_argnames="config")
def look(config: TargetConfig, params: Params, hidden: Float[Array, "1 t d"], feature: Float[Array, "1 t d"]) -> Seen:
    """Compare a layer's output between positions, and what it would say now with what the target says in the end."""

    def says(normed: Float[Array, "1 t d"]) -> Int[Array, "1 t"]:
        logits: Any = Target(config).apply({"params": params}, normed, method="logits")
        return likeliest(logits)

    unit = feature / jnp.linalg.norm(feature, axis=-1, keepdims=True)
    normed: Any = RMSNorm(config.rms_norm_eps).apply({"params": params["final_norm"]}, feature)
    early = says(normed)
    return Seen(
        size=jnp.sqrt((feature**2).mean()),
        neighbours=(unit[:, 1:] * unit[:, :-1]).sum(axis=-1).mean(),
        agrees=(early == says(hidden)).mean(),
        guess=early[0, -1],
    )


def main(argv: Sequence[str]) -> None:
    """Print the features' shape, and a line on each tapped layer.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    compile_cache.keep()
    ckpt = args.ckpt or str(find_demo_target())
    tokenizer = load_tokenizer(ckpt)
    ids = tokenizer(args.text)["input_ids"]
    check(len(ids) > 1, f"--text: {len(ids)} tokens; two or more are right")
    target = load_target(ckpt, "float32", watch=progress.show)
    config, layers = target.config, target.config.num_layers
    taps = tuple(args.taps or range(layers))
    check(max(taps) < layers, f"--taps: {max(taps)}; the target's layers are 0 to {layers - 1}")
    check(len(ids) <= config.max_positions, f"--text: {len(ids)} tokens; the target ends at {config.max_positions}")

    tokens = jnp.asarray([ids], jnp.int32)
    hidden, features = read(config, taps, target.params, tokens)
    print(f"{len(ids)} tokens, hidden size {config.hidden_size}, {len(taps)} taps: features {features.shape}\n")
    print("layer    size  neighbours  agrees  says next")
    for layer, feature in zip(taps, jnp.split(features, len(taps), axis=-1), strict=True):
        seen = look(config, target.params, hidden, feature)
        word = repr(tokenizer.decode([int(seen.guess)]))
        print(f"{layer:5} {seen.size:7.2f} {seen.neighbours:11.2f} {seen.agrees:7.0%}  {word}")
    print(
        "\nsize: root mean square. neighbours: mean cosine similarity of positions side by side. agrees: positions "
        "where\nthis layer, through the final norm and the head, says what the target says in the end. says next: "
        "after the text."
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python examples/tap_features.py",
        description="Run a text through a target, and print what the outputs of its layers show.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--ckpt", metavar="T", help="the target (default: the demo's)")
    parser.add_argument("--text", metavar="TEXT", default=TEXT, help="what the target reads, without a chat template")
    parser.add_argument("--taps", type=whole(0), nargs="+", metavar="LAYER", help="layers to tap (default: all)")
    return parser


if __name__ == "__main__":
    cli.run(main)
