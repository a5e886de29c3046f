"""What a process with eight devices does in tests/test_experts.py: a target with experts, on one and on all.

`python -m tests.experts_worker FOUND.json` writes the features that training reads, the tokens that decoding says, and
how large the parts of the experts are that one device has.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax import reading, sharding
from inference.engine import SamplingConfig
from tests import mesh_worker, tiny
from tests.test_experts import EXPERTS

layers = tuple(dataclasses.replace(layer, experts=EXPERTS) for layer in mesh_worker.TARGET.layers)
TARGET = dataclasses.replace(mesh_worker.TARGET, family="qwen3_moe", layers=layers)
MESHES = {"one": (1, 1, 1), "eight": (2, 2, 2)}
DECODED: dict[str, dict[str, Any]] = {"one": {}, "eight": {"mesh": sharding.make_mesh(data=2, tensor=4)}}
TAPS = (0, 1)


@functools.partial(jax.jit, static_argnums=0)
def read(mesh, weights, tokens, starts):
    with sharding.traced_on(mesh):
        return reading.read(TARGET, TAPS, weights, tokens, starts, True)


def features(mesh):
    """What training reads of rows of two documents."""
    params = sharding.put_params(mesh, tiny.params(TARGET, 0))
    weights = reading.stack(mesh, TARGET, TAPS, params, through=True)
    rows = np.arange(4 * 12).reshape(4, 12) % tiny.VOCABULARY, np.where(np.arange(12) < 5, 0, 5)[None].repeat(4, 0)
    where = NamedSharding(mesh, sharding.TRAINED_ROWS)
    found = read(mesh, weights, *(jax.device_put(array.astype(np.int32), where) for array in rows))
    return np.concatenate(found, axis=-1).tolist()


def main() -> None:
    """Compare."""
    trained = {name: features(sharding.make_mesh(*sizes)) for name, sizes in MESHES.items()}
    decoded, exchanged = {}, {}
    for name, options in DECODED.items():
        engine = tiny.engine(TARGET, mesh_worker.DRAFT, batch_size=2, **options)
        answers = engine.generate(tiny.prompts(5, seed=1), SamplingConfig(max_new_tokens=24))
        decoded[name] = [[one.token_ids, one.emitted_per_block] for one in answers]
        exchanged[name] = mesh_worker.largest_exchanges(engine) if options else {}
    mesh = sharding.make_mesh(data=2, tensor=4)
    experts = sharding.put_params(mesh, tiny.params(TARGET, 0))["layers_0"]["experts"]
    parts = [experts[name].addressable_shards[0].data.shape for name in ("gate_proj", "down_proj")]
    found = {"trained": trained, "decoded": decoded, "parts": parts, "exchanged": exchanged["eight"]}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
