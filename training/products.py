"""How many floating-point operations a program's products are, loops included; compilers count a loop's body once."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# A product of groups multiplies every row once, by the matrix of its group.
DIMENSIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dot_general": lambda params: params["dimension_numbers"],
    "ragged_dot_general": lambda params: params["ragged_dot_dimension_numbers"].dot_dimension_numbers,
}


def flops(jaxpr: Any, turns: float) -> float:
    """Return the operations of all matrix products: two for each multiplication, over all devices.

    Args:
        jaxpr: of the traced program.
        turns: how often the body of a loop whose length follows from data is taken to run.
    """
    return sum(_of(equation, turns) for equation in jaxpr.eqns)


def _of(equation: Any, turns: float) -> float:
    name, params = equation.primitive.name, equation.params
    if name in DIMENSIONS:
        (contracted, _), _ = DIMENSIONS[name](params)
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    inner = [flops(jaxpr, turns) for jaxpr in _inner(params)]
    if name == "cond":
        return max(inner)
    times = {"scan": params.get("length", 1), "while": turns, "shard_map": math.prod(_sizes(params))}.get(name, 1)
    return times * sum(inner)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the programs that an operation runs."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _sizes(params: dict[str, Any]) -> tuple[int, ...]:
    mesh: jax.sharding.AbstractMesh | None = params.get("mesh")
    return () if mesh is None else mesh.axis_sizes
