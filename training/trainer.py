"""A run from its settings to a draft: what it stands on, where it begins, and what it leaves behind."""

import contextlib
import dataclasses
import functools
import math
from pathlib import Path

import jax
from jax.sharding import Mesh

from convert import LoadedTarget, load_target, processes, progress
from convert.demo_target import find_demo_target
from convert.files import about, read_json
from convert.load import target_config
from convert.progress import tell
from convert.published import publish
from convert.sources import open_source
from dflash_jax import reading, sharding
from dflash_jax.config import DraftConfig
from dflash_jax.errors import check, memory_named
from dflash_jax.parameters import Params
from training import compatible, data, optimizer, record, scored, together
from training.checkpoints import Checkpoints
from training.config import MeshConfig, RunConfig
from training.feature_cache import MANIFEST, FeatureCache, open_cache
from training.fill_cache import fill
from training.initial import fingerprint, first_state, initial_draft
from training.loop import Grounds, Loop
from training.packing import hold_out
from training.prepared import Prepared, check_tokenizer, open_prepared
from training.step import SCORED, Task, TrainState

DRAFT = "draft"
TOO_MUCH = (
    "--train.batch-size, --train.length, --train.anchors: they ask for more memory than there is; less of one, "
    "--train.remat, or more devices for --mesh.fsdp, is right"
)


def train(config: RunConfig, prepared_path: Path, output: Path) -> None:
    """Train, or go on where an earlier run in the same output stopped, and write the draft.

    Raises:
        UserError: data, target, output or settings that are not right or do not fit each other; a loss that is not
            finite; no room for what is written.
    """
    with together.none_left_waiting(), memory_named(TOO_MUCH), contextlib.ExitStack() as stack:
        prepared = open_prepared(prepared_path)
        mesh = _mesh(config)
        processes.by_first(lambda: stack.enter_context(record.only_run_in(output)))
        target = _load_target(config, prepared, mesh)
        grounds, state = _begin(config, prepared, target, mesh, output)
        # Twice: leaving the checkpoints waits for the other processes, too.
        with (
            Checkpoints(output, config.checkpoint) as checkpoints,
            together.none_left_waiting(),
            memory_named(TOO_MUCH),
        ):
            position = None
            if checkpoints.latest is not None:
                state, position = checkpoints.restore(state)
            if int(state.step) < grounds.task.steps:
                state = Loop(grounds, checkpoints, output).run(state, position)
            else:
                tell(f"--output {output}: all {grounds.task.steps} steps are taken already")
        updates = int(optimizer.updates_of(state.moments))
        check(
            updates > 0,
            f"--data {prepared_path}: in {int(state.step)} steps there was no answer within --train.length "
            f"{config.train.length} to learn from; rows with longer ones, or a greater length, are right",
        )
        params = jax.tree.map(together.whole, state.params)
        processes.by_first(lambda: _export(output / DRAFT, grounds.task.draft, params, config))
    if processes.first():
        print(f"{output / DRAFT}: a draft trained for {updates} steps")


def _mesh(config: RunConfig) -> Mesh:
    """Lay out the devices of all processes."""
    sizes = dataclasses.asdict(config.mesh.on(jax.device_count()))
    used = math.prod(sizes.values())
    if used < jax.device_count():
        tell(f"--mesh.data, --mesh.fsdp, --mesh.tensor: {used} of {jax.device_count()} devices are used")
    with about("--mesh.data, --mesh.fsdp, --mesh.tensor"):
        return sharding.make_mesh(**sizes)


def _export(destination: Path, draft: DraftConfig, params: Params, config: RunConfig) -> None:
    """Write the draft, unless it is there already."""
    if not destination.exists():
        return publish(destination, draft, params, config.export.dtype)
    found = read_json(destination / "config.json").get("dtype")
    return check(
        found == config.export.dtype,
        f"--export.dtype: {config.export.dtype}, and {destination} is there already in {found}; removing it lets it be "
        "written again",
    )


def _load_target(config: RunConfig, prepared: Prepared, mesh: Mesh) -> LoadedTarget:
    """Load the target, in the dtype that the run computes in, if the data was made for it."""
    name = config.target or str(find_demo_target("--target"))
    source = open_source(name)
    described = target_config(source)
    # Before anything is exchanged: on another mesh that would wait for ever.
    together.check_same([record.settings(config), prepared.manifest["data_hash"], described.to_hf()])
    compatible.check_run(config, described, mesh)
    check_tokenizer(prepared, source)
    with together.read_alike(functools.partial(sharding.place, mesh)) as place:
        return load_target(name, config.train.dtype, place=place, watch=progress.show)


def _begin(
    config: RunConfig, prepared: Prepared, target: LoadedTarget, mesh: Mesh, output: Path
) -> tuple[Grounds, TrainState]:
    """Put together what the run stands on, and its first state."""
    draft, params = initial_draft(config, target, mesh)
    with about("--mesh.fsdp, --mesh.tensor"):
        sharding.check_mesh(mesh, draft)
    train_on, held = hold_out(prepared.lines, config.evaluation.rows, config.seed)
    rows = data.packed(prepared, train_on, config.train.length, config.seed)
    check(
        bool((prepared.supervised[train_on] > 1).any()),
        f"--data {prepared.path}: no answer of two tokens or more to learn from; rows with longer ones are right",
    )
    steps = config.train.steps or data.steps_of(len(rows), config.train.batch_size, config.train.epochs)
    task = Task.of(config, target.config, draft, mesh, steps)
    mark = fingerprint(target.params)
    facts = {"target_weights": mark, "data": prepared.manifest["data_hash"], "draft": draft.to_hf()}
    resolved = _resolved(config, task, target.source)
    processes.by_first(lambda: record.write_or_compare(output, resolved, facts))
    record.check_alike(output, resolved, facts)
    taps, cache = draft.target_layer_ids, None
    weights = reading.stack(mesh, target.config, taps, target.params, through=task.needs_teacher)
    target.params.clear()  # of layers that are not run
    if config.features.cache:
        cache = _cache(config, task, prepared, weights, mark)
        weights = {name: weights[name] for name in ("embedding", "head") if name in weights}
    if size := config.loss.vocabulary:
        weights = weights | {SCORED: scored.part_of_head(size, task, weights, rows)}
    tell(
        f"{rows.documents} documents to train on, {len(held)} held out; "
        f"{int((prepared.lengths > config.train.length).sum())} longer than {config.train.length} tokens and cut; "
        f"{len(rows)} rows, {rows.padding:.1%} of them padding; {task.steps} steps of {config.train.batch_size} rows; "
        f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters to train"
    )
    held_out = data.packed(prepared, held, config.train.length, config.seed, cache)
    grounds = Grounds(config, task, weights, dataclasses.replace(rows, cache=cache), held_out)
    return grounds, first_state(task, params)


def _resolved(config: RunConfig, task: Task, target: str) -> RunConfig:
    """Return the settings with what they leave to be found out."""
    return dataclasses.replace(
        config,
        target=target,
        train=dataclasses.replace(config.train, steps=task.steps),
        loss=dataclasses.replace(config.loss, gamma=task.gamma),
        mesh=MeshConfig(**task.mesh.shape),
    )


def _cache(config: RunConfig, task: Task, prepared: Prepared, target: Params, mark: str) -> FeatureCache:
    """Open the cache of features, and fill it where it is not full."""
    taps = task.draft.target_layer_ids
    widths = {"features": len(taps) * task.target.hidden_size}
    widths |= {"hidden": task.target.hidden_size} if task.needs_teacher else {}
    facts = {"target": mark, "taps": list(taps), "widths": widths, "length": config.train.length, "dtype": task.dtype}
    opened = functools.partial(open_cache, Path(str(config.features.cache)), facts, prepared)
    told = f"--features.cache {config.features.cache}"
    processes.by_first(opened)
    together.wait_for(Path(str(config.features.cache)) / MANIFEST, told)
    cache = opened()
    fill(cache, task, target)
    return cache
