"""Training without any of the machinery under test: dense masks, all logits at once, one matrix product after another.

Written from the laws; nothing is shared with the code under test but the rotary angles, which have tests of their own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, LayerConfig, TargetConfig, TransformerConfig
from dflash_jax.rope import angles

Tree = dict[str, Any]


def norm(x: jax.Array, params: Tree, eps: float) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * jnp.broadcast_to(params["scale"], x.shape)


def turn(x: jax.Array, config: TransformerConfig, layer: LayerConfig, spots: np.ndarray) -> jax.Array:
    """[s, heads, h] at the given positions."""
    cos, sin = (part[0][:, None] for part in angles(layer.rotary, config.head_dim, jnp.asarray(spots)[None]))
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def project(x: jax.Array, params: Tree, name: str, config: TransformerConfig) -> jax.Array:
    return (x @ params[f"{name}_proj"]["kernel"]).reshape(len(x), -1, config.head_dim)


def normed(x: jax.Array, params: Tree, name: str, config: TransformerConfig) -> jax.Array:
    return norm(x, params[f"{name}_norm"], config.rms_norm_eps) if config.qk_norm else x


def mix(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: np.ndarray) -> jax.Array:
    share = queries.shape[1] // keys.shape[1]
    keys, values = jnp.repeat(keys, share, axis=1), jnp.repeat(values, share, axis=1)
    scores = jnp.einsum("qnh,snh->nqs", queries, keys) * queries.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e30), axis=-1)
    return jnp.einsum("nqs,snh->qnh", weights, values).reshape(len(queries), -1)


def feed(x: jax.Array, params: Tree, config: TransformerConfig) -> jax.Array:
    y = norm(x, params["mlp_norm"], config.rms_norm_eps)
    gate, up = (y @ params["mlp"][f"{name}_proj"]["kernel"] for name in ("gate", "up"))
    return x + (gate * jax.nn.sigmoid(gate) * up) @ params["mlp"]["down_proj"]["kernel"]


def target_outputs(config: TargetConfig, params: Tree, tokens: np.ndarray, starts: np.ndarray) -> list[jax.Array]:
    """Outputs of all layers for one row, and last of all the state after the final norm."""
    x = params["embedding"][tokens]
    rows = np.arange(len(tokens))
    spots = rows - starts
    outputs = []
    for i, layer in enumerate(config.layers):
        at, y = params[f"layers_{i}"], norm(x, params[f"layers_{i}"]["input_norm"], config.rms_norm_eps)
        attention = at["attention"]
        queries = turn(normed(project(y, attention, "q", config), attention, "q", config), config, layer, spots)
        keys = turn(normed(project(y, attention, "k", config), attention, "k", config), config, layer, spots)
        distance = rows[:, None] - rows[None]
        mask = (distance >= 0) & (starts[:, None] == starts[None])
        mask &= distance < layer.window if layer.window else True
        x = x + mix(queries, keys, project(y, attention, "v", config), mask) @ attention["o_proj"]["kernel"]
        x = feed(x, at, config)
        outputs.append(x)
    return [*outputs, norm(x, params["final_norm"], config.rms_norm_eps)]


def head(config: TargetConfig, params: Tree, hidden: jax.Array) -> jax.Array:
    return hidden @ (params["embedding"].T if config.tie_word_embeddings else params["head"])


def draft_states(
    config: DraftConfig,
    params: Tree,
    embedding: jax.Array,
    tokens: np.ndarray,
    starts: np.ndarray,
    features: jax.Array,
    anchors: list[int],
) -> jax.Array:
    """States of all slots of one row, [m * t, d]: context and all blocks are keys of one softmax under one mask."""
    t, s = config.block_size, len(tokens)
    x = embedding[np.concatenate([[tokens[a], *[config.mask_token_id] * (t - 1)] for a in anchors])]
    block = np.repeat(np.arange(len(anchors)), t)
    anchor = np.repeat(anchors, t)
    slot = np.tile(np.arange(t), len(anchors))
    rows = np.arange(s)
    spots, places = rows - starts, anchor - starts[anchor] + slot
    fused = norm(features @ params["fc"]["kernel"], params["context_norm"], config.rms_norm_eps)
    for i, layer in enumerate(config.layers):
        at = params[f"layers_{i}"]
        attention, y = at["attention"], norm(x, at["input_norm"], config.rms_norm_eps)
        queries = turn(normed(project(y, attention, "q", config), attention, "q", config), config, layer, places)
        both = [
            turn(normed(project(z, attention, "k", config), attention, "k", config), config, layer, where)
            for z, where in ((fused, spots), (y, places))
        ]
        values = jnp.concatenate([project(z, attention, "v", config) for z in (fused, y)])
        before = (rows[None] < anchor[:, None]) & (starts[None] == starts[anchor][:, None])
        within = block[:, None] == block[None]
        if layer.causal:
            within &= slot[:, None] >= slot[None]
        if layer.window:
            before &= places[:, None] - spots[None] < layer.window
            within &= abs(slot[:, None] - slot[None]) < layer.window
        mask = np.concatenate([before, within], axis=1)
        x = x + mix(queries, jnp.concatenate(both), values, mask) @ attention["o_proj"]["kernel"]
        x = feed(x, at, config)
    return norm(x, params["final_norm"], config.rms_norm_eps)


def weighted(supervised: np.ndarray, starts: np.ndarray, anchor: int, t: int) -> list[bool]:
    """Law 11: slot k counts if all of a+1…a+k are supervised and of the anchor's document."""
    found: list[bool] = []
    for k in range(1, t):
        at = anchor + k
        right = at < len(starts) and supervised[at] and starts[at] == starts[anchor]
        found.append(bool(right) and all(found))
    return found
