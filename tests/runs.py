"""Runs on the tiny pair, in this process or another."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from tests import pair
from training import prepared
from training.config import (
    CheckpointConfig,
    DraftShape,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

LENGTH, STEPS = 48, 20
TIMES = ("tokens_per_second",)
MARKED = {line: 249 + line for line in range(1, 7)}
CONFIG = RunConfig(
    preset="tiny",
    train=TrainConfig(steps=STEPS, batch_size=2, length=LENGTH, anchors=4, dtype="float32", log_every=1),
    draft=DraftShape(layers=2, taps=1, block_size=8, mask_token_id=pair.MASK),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    checkpoint=CheckpointConfig(every=5, keep=100),
    evaluation=EvaluationConfig(every=10, rows=4),
)


def write_target(directory: Path) -> Path:
    return pair.write_target(directory)


def write_prepared(directory: Path, rows: int = 60, unsupervised: int = 0, **facts: Any) -> Path:
    """Documents of lines 1, 2, …; the first ones may be without an answer. `MARKED` have a token of their own."""
    rng = np.random.default_rng(0)
    made = []
    for line in range(1, rows + 1):
        tokens = rng.integers(0, 250, rng.integers(20, LENGTH + 3)).tolist()
        tokens[5] = MARKED.get(line, tokens[5])
        made.append((line, tokens, [line > unsupervised and i >= 4 for i in range(len(tokens))]))
    directory.mkdir(parents=True)
    prepared.write_shard(directory, 0, "chats", made)
    told = {
        "target": "tiny",
        "input": "chats.jsonl",
        "input_hash": "0",
        "tokenizer_hash": prepared.tokenizer_hash(pair.tokenizer()),
        "template_hash": "0",
        "stop_token_ids": [pair.STOP],
        "vocab_size": pair.VOCABULARY,
        "thinking": False,
    }
    prepared.finish(directory, 1, told | facts)
    return directory


def changed(config: RunConfig, **fields: Any) -> RunConfig:
    """Replace fields by their names, `train__steps` for those of a section."""
    for name, value in fields.items():
        section, _, field = name.rpartition("__")
        inner = dataclasses.replace(getattr(config, section), **{field: value}) if section else value
        config = dataclasses.replace(config, **{section or field: inner})
    return config


def flags(config: RunConfig) -> list[str]:
    """Spell a config's settings for the command line."""
    given = []
    for section, value in dataclasses.asdict(config).items():
        for field, one in value.items() if isinstance(value, dict) else ():
            name = f"{section}.{field}".replace("_", "-")
            if isinstance(one, bool):
                given.append(f"--{'' if one else 'no-'}{name}")
            else:
                given += [f"--{name}", "none" if one is None else str(one)]
    return given


def command(target: Path, data: Path, output: Path, *more: str, config: RunConfig = CONFIG) -> dict[str, Any]:
    """What `subprocess` takes to run it."""
    where = ["--target", str(target), "--data", str(data), "--output", str(output)]
    return {
        "args": [sys.executable, "-m", "training.run", "tiny", *where, *flags(config), *more],
        "env": os.environ | {"JAX_PLATFORMS": "cpu"},
    }


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without times."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def checkpoints(output: Path) -> list[int]:
    """The steps of those that are there."""
    return sorted(int(path.name) for path in (output / "checkpoints").iterdir() if path.name.isdecimal())


def bits(output: Path, step: int) -> dict[str, bytes]:
    """All that a checkpoint holds: parameters, moments, step and the position in the data."""
    place = output / "checkpoints" / str(step)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{place.absolute()}/state/"}}
    held = {"data": (place / "data" / "metadata").read_bytes()}
    for key in tensorstore.KvStore.open(store).result().list().result():
        if (name := key.decode()).endswith("/.zarray"):
            at = {"driver": "zarr", "kvstore": store | {"path": name.removesuffix(".zarray")}}
            held[name] = tensorstore.open(at, read=True).result().read().result().tobytes()
    return held
