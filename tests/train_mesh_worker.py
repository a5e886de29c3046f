"""What a process with eight devices does in tests/test_train_mesh.py: the same run on several meshes.

`python -m tests.train_mesh_worker TARGET PREPARED DIRECTORY` writes runs into the directory, each named by its mesh,
those that went on on other devices `eight-then-…`, and into `found.json` how the state lay, and a part of a head.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np

from dflash_jax import sharding
from tests import pair, runs
from training import data, scored, trainer
from training.checkpoints import Checkpoints
from training.config import MeshConfig
from training.loop import Loop
from training.prepared import open_prepared
from training.step import Task

MESHES = {"one": (1, 1, 1), "two": (1, 2, 1), "eight": (2, 2, 2)}
MIDDLE = 10
# One layer: eight pretended devices on two cores wait for one another at every exchange.
CONFIG = runs.changed(runs.CONFIG, train__batch_size=4, draft__layers=1, optimizer__learning_rate=1e-3)


def config_on(mesh, target):
    return runs.changed(CONFIG, mesh=MeshConfig(*MESHES[mesh]), target=target)


def as_it_was(base, name):
    """Copy the run on eight devices as it was in the middle."""
    output = base / name
    shutil.copytree(base / "eight", output)
    shutil.rmtree(output / "draft")
    for step in runs.checkpoints(output):
        if step > MIDDLE:
            shutil.rmtree(output / "checkpoints" / str(step))
    return output


def restored(output, state, mesh):
    """The leaves of the state in the middle, as bytes, read onto a mesh."""
    places = sharding.shardings(mesh, state)
    like = jax.tree.map(lambda leaf, where: jax.device_put(np.zeros(leaf.shape, leaf.dtype), where), state, places)
    with Checkpoints(output, CONFIG.checkpoint) as checkpoints:
        found, _ = checkpoints.restore(like)
    assert all(leaf.sharding.mesh.shape == mesh.shape for leaf in jax.tree.leaves(found))
    return sorted(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found))


def part_of_a_head(prepared):
    """Whether each device has its own of a part's columns, for a head of its own and for an embedding."""
    rows = data.packed(open_prepared(prepared), np.arange(10), runs.LENGTH, 0)
    tokens = scored.choose(scored.count(rows, pair.VOCABULARY), 40)
    mesh = sharding.make_mesh(*MESHES["eight"])
    found = []
    for tied in (False, True):
        target = dataclasses.replace(pair.TARGET, tie_word_embeddings=tied)
        task = Task(target, pair.DRAFT, 4, "decay", 4.0, "float32", False, CONFIG.optimizer, 1, mesh)
        weights = {
            name: np.random.default_rng(0).random(size)
            for name, size in (("embedding", (264, 16)), ("head", (16, 264)))
        }
        part = scored.part_of_head(40, task, sharding.put_params(mesh, weights), rows)
        expected = (weights["embedding"].T if tied else weights["head"])[:, tokens]
        right = (np.asarray(part["head"]) == expected.astype(np.float32)).all()
        found.append([bool(right), part["head"].addressable_shards[0].data.shape])
    return found


def main() -> None:
    """Train, go on elsewhere, and compare bits."""
    target, prepared, base = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    states = {}

    class Watched(Loop):
        def run(self, state, position):
            states[self._grounds.task.mesh.size] = (
                [(leaf.shape, leaf.addressable_shards[0].data.shape) for leaf in jax.tree.leaves(state)],
                jax.eval_shape(lambda: state),
            )
            return super().run(state, position)

    trainer.Loop = Watched  # type: ignore[misc]
    for mesh in ("one", "eight"):
        trainer.train(config_on(mesh, target), prepared, base / mesh)
    saved = sorted(value for name, value in runs.bits(base / "eight", MIDDLE).items() if name != "data")
    parts, state = states[8]
    same = {}
    for mesh, sizes in MESHES.items():
        output = as_it_was(base, f"eight-then-{mesh}")
        same[mesh] = restored(output, state, sharding.make_mesh(*sizes)) == saved
        if mesh != "eight":
            trainer.train(config_on(mesh, target), prepared, output)
    (base / "found.json").write_text(json.dumps({"same": same, "parts": parts, "scored": part_of_a_head(prepared)}))


if __name__ == "__main__":
    main()
