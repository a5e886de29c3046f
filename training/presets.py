"""Runs by name: the paper's recipe for published targets, and two small ones for the demo's target."""

import dataclasses

from training.config import (
    CheckpointConfig,
    DraftShape,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

QWEN3_MASK = 151669  # the first row of the embedding that is no token of the tokenizer
LLAMA3_MASK = 128002  # reserved, and never in a text; neither padding nor a stop
SMOLLM2_MASK = 16  # <empty_output>, a marker of notebooks, which chats do not have

# The demo's target is so small that its features cost more to keep than to compute, and a CPU has no fast bfloat16.
_DEMO = RunConfig(
    preset="smollm2-demo",
    train=TrainConfig(epochs=6, batch_size=8, length=512, anchors=64, dtype="float32"),
    draft=DraftShape(layers=5, taps=5, block_size=8, mask_token_id=SMOLLM2_MASK),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    checkpoint=CheckpointConfig(every=50),
    evaluation=EvaluationConfig(every=50, rows=32),
)
_QWEN3 = RunConfig(
    preset="qwen3-8b",
    target="Qwen/Qwen3-8B",
    train=TrainConfig(remat=True),
    draft=DraftShape(mask_token_id=QWEN3_MASK),
)
_PRESETS = (
    dataclasses.replace(
        _DEMO,
        preset="tiny",
        train=TrainConfig(epochs=1, steps=60, batch_size=2, length=512, anchors=64, dtype="float32"),
        draft=DraftShape(layers=2, taps=5, block_size=8, mask_token_id=SMOLLM2_MASK),
        evaluation=EvaluationConfig(every=30, rows=12),
    ),
    _DEMO,
    dataclasses.replace(_QWEN3, preset="qwen3-0.6b", target="Qwen/Qwen3-0.6B", train=TrainConfig()),
    dataclasses.replace(_QWEN3, preset="qwen3-4b", target="Qwen/Qwen3-4B"),
    _QWEN3,
    dataclasses.replace(
        _QWEN3,
        preset="llama3.1-8b",
        target="meta-llama/Llama-3.1-8B-Instruct",
        draft=DraftShape(block_size=10, mask_token_id=LLAMA3_MASK),
    ),
)
PRESETS = {preset.preset: preset for preset in _PRESETS}
