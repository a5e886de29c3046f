"""What the machine could do, and how near decoding comes: `python -m benchmarks.limits`.

Measures in one run, on the demo pair with one row: how fast memory can be read and large matrices multiplied, what the
products of a token and of a block take with everything else left out, and what tokens and blocks take in the engine.
"""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from convert import cli
from convert.demo_target import find_demo_target
from dflash_jax.parameters import Params
from inference.demo import DEMO_DRAFT
from inference.engine import Engine, SamplingConfig

PASSES, ROUNDS = 16, 5
GIB = 2**30


def main(argv: Sequence[str]) -> None:
    """Measure, and say what share of the limits is reached and where the rest goes."""
    parser = cli.Parser(prog="python -m benchmarks.limits", description=__doc__)
    parser.parse_args(argv)
    bandwidth = GIB / _best(jax.jit(jnp.sum), jnp.ones(GIB // 4)) / 1e9
    square = jnp.ones((2048, 2048))
    arithmetic = 2 * 2048**3 / _best(jax.jit(jnp.matmul), square, square) / 1e9
    print(f"memory is read at {bandwidth:.1f} GB/s, large matrices are multiplied at {arithmetic:.0f} GFLOP/s")
    engine = Engine.load(str(find_demo_target()), str(DEMO_DRAFT), max_length=512)
    target, draft = engine._weights
    rows = int(engine.block_size)
    token = _best(functools.partial(_passes, 1), target, {}) / PASSES
    block = _best(functools.partial(_passes, rows), target, draft) / PASSES
    held, drafts = _bytes(target), _bytes(draft)
    head = target["embedding"].nbytes
    _tell("token", token, _pass_seconds(engine, speculate=False), held, 2 * held / 4, bandwidth, arithmetic)
    flops = 2 * rows * (held + drafts) / 4 + 2 * (rows - 1) * head / 4
    _tell("block", block, _pass_seconds(engine, speculate=True), held + drafts + head, flops, bandwidth, arithmetic)


def _tell(
    name: str, products: float, whole: float, read: int, flops: float, bandwidth: float, arithmetic: float
) -> None:
    least = read / bandwidth / 1e9
    print(
        f"{name}: {1e3 * whole:.1f} ms; reading its {read / 1e6:.0f} MB of weights takes {1e3 * least:.1f} ms at the "
        f"least ({least / whole:.0%} of the time); its products alone take {1e3 * products:.1f} ms "
        f"({products / whole:.0%}), at {flops / products / 1e9:.0f} GFLOP/s ({flops / products / 1e9 / arithmetic:.0%} "
        f"of large ones'); the rest, {1e3 * (whole - products):.1f} ms, is attention, norms, rotation and the loop"
    )


@functools.partial(jax.jit, static_argnums=0)
def _passes(rows: int, target: Params, draft: Params) -> jax.Array:
    """Multiply by every matrix of a pass, each waiting for the one before, many times."""

    def once(_: int, x: jax.Array) -> jax.Array:
        for stack in (draft, target):
            if "fc" in stack:
                x = _through(x, stack["fc"]["kernel"])
            for name in sorted(stack):
                if name.startswith("layers_"):
                    layer = stack[name]
                    for group in (layer["attention"], layer["mlp"]):
                        for product in group.values():
                            x = _through(x, product["kernel"]) if "kernel" in product else x
            if stack:
                scores = jnp.einsum("td,vd->tv", x, target["embedding"])
                x += scores.max(axis=-1, keepdims=True) * 1e-9
        return x

    return jax.lax.fori_loop(0, PASSES, once, jnp.ones((rows, target["embedding"].shape[1])))


def _through(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply, and return to the width that x has."""
    wide = jnp.tile(x, (1, -(-kernel.shape[0] // x.shape[1])))[:, : kernel.shape[0]]
    out = wide @ kernel
    back = jnp.tile(out, (1, -(-x.shape[1] // out.shape[1])))[:, : x.shape[1]]
    return x + back * 1e-3


def _best(program: Callable[..., jax.Array], *inputs: object) -> float:
    program(*inputs).block_until_ready()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        program(*inputs).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _pass_seconds(engine: Engine, *, speculate: bool) -> float:
    seconds = []
    for _ in range(ROUNDS):
        [answer] = engine.generate([list(range(100, 200))], SamplingConfig(64), speculate)
        seconds.append(answer.decode_seconds / len(answer.emitted_per_block))
    return min(seconds)


def _bytes(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    cli.run(main)
