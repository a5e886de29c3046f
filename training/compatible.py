"""What settings, a target and a mesh must be to one another, for a run as for a plan of one."""

from jax.sharding import AbstractMesh, Mesh

from convert.files import about
from dflash_jax import sharding
from dflash_jax.config import TargetConfig
from dflash_jax.errors import check
from training.config import RunConfig


def check_run(config: RunConfig, target: TargetConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuse what cannot be trained together.

    Raises:
        UserError: naming the flag.
    """
    groups = sharding.row_groups(mesh)
    check(
        config.train.batch_size % groups == 0,
        f"--train.batch-size: {config.train.batch_size} rows do not divide over {groups} groups of devices, "
        f"--mesh.data times --mesh.fsdp; a multiple of {groups}, or more of --mesh.tensor in their place, is right",
    )
    with about("--mesh.fsdp, --mesh.tensor"):
        sharding.check_mesh(mesh, target)
    check(
        config.train.length <= target.max_positions,
        f"--train.length: {config.train.length}; the target ends at {target.max_positions} tokens",
    )
    if config.loss.vocabulary is not None:
        _check_vocabulary(config.loss.vocabulary, target.vocab_size, mesh.shape["tensor"])


def _check_vocabulary(size: int, most: int, parts: int) -> None:
    check(size <= most, f"--loss.vocabulary: {size}, and the target has {most} tokens; {most} or fewer is right")
    check(
        size % parts == 0,
        f"--loss.vocabulary: {size} tokens do not divide over --mesh.tensor, {parts}; a multiple of it is right",
    )
