"""Every program of a model lowers for TPUs and for GPUs, in published sizes, on a mesh without devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from dflash_jax import parameters, sharding
from dflash_jax.anchors import Anchors
from dflash_jax.presets import TARGETS
from inference import decode
from training.compile_elsewhere import describe
from training.evaluation import judge
from training.initial import draft_config
from training.presets import PRESETS
from training.step import read_target, train_step

MESH: Any = AbstractMesh((2, 2, 2), sharding.AXES)
TRAINED, DECODED = "qwen3-4b", "llama3.1-8b"
PLATFORMS = pytest.mark.parametrize("platform", ["tpu", "cuda"])


def lowered(program, platform, *arguments):
    text = program.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert "sharding" in text
    return text


@functools.cache
def training(loss="decay"):
    preset = PRESETS[TRAINED]
    config = dataclasses.replace(preset, loss=dataclasses.replace(preset.loss, name=loss))
    return describe(config, TARGETS[TRAINED], MESH)


@PLATFORMS
@pytest.mark.parametrize("loss", ["decay", "kl"])
def test_the_step_of_training_lowers(platform, loss):
    task, arguments = training(loss)
    lowered(train_step, platform, task, *arguments)


@PLATFORMS
def test_evaluation_and_reading_lower(platform):
    task, (target, state, batch, *_) = training()
    lowered(read_target, platform, task, target, batch)
    where = NamedSharding(MESH, sharding.TRAINED_ROWS)
    rows: Any
    valid: Any
    rows, valid = (jax.ShapeDtypeStruct((8, task.anchors), dtype, sharding=where) for dtype in (jnp.int32, jnp.bool))
    lowered(judge, platform, task, target, state.params, batch, Anchors(rows, valid))


@PLATFORMS
@pytest.mark.parametrize("drafted", [True, False])
def test_the_programs_of_decoding_lower(platform, drafted):
    target = dataclasses.replace(TARGETS[DECODED], layers=TARGETS[DECODED].layers[:6])
    draft = draft_config(
        dataclasses.replace(PRESETS[DECODED], draft=dataclasses.replace(PRESETS[DECODED].draft, taps=2)), target
    )
    models = decode.Models(target, draft if drafted else None, draft.block_size if drafted else 1, MESH)

    def shape(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, sharding.WHOLE))

    def placed(config):
        shapes = parameters.shapes(config)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=where),
            shapes,
            sharding.shardings(MESH, shapes),
        )

    weights = decode.Weights(placed(target), placed(draft) if drafted else {})
    state = jax.eval_shape(lambda: decode.empty_state(models, 8, 2048, jnp.dtype(jnp.bfloat16)))
    one, chunk = shape((), jnp.int32), shape((1, 256), jnp.int32)
    request = decode.Request(
        one,
        one,
        shape(state.stops.shape[1:], jnp.int32),
        jax.tree.map(lambda leaf: shape((1,), leaf.dtype), state.policy),
    )
    lowered(decode.prefill, platform, models, weights, state, one, chunk, one, one)
    lowered(
        decode.admit, platform, models, weights, state, one, shape((1, 1, target.hidden_size), jnp.bfloat16), request
    )
    lowered(decode.decode, platform, models, weights, state, one)
