"""Settings, targets and meshes that cannot be trained together."""

import pytest
from jax.sharding import AbstractMesh

from dflash_jax import sharding
from dflash_jax.errors import UserError
from tests import runs, tiny
from training import compatible


@pytest.mark.parametrize(
    ("mesh", "changes", "told"),
    [
        ((2, 2, 1), {"train__batch_size": 6}, "--train.batch-size: 6 rows do not divide over 4 groups"),
        ((1, 3, 1), {"train__batch_size": 6}, "--mesh.fsdp, --mesh.tensor: mesh: fsdp=3 does not divide 16 hidden"),
        ((1, 1, 4), {}, "--mesh.fsdp, --mesh.tensor: mesh: tensor=4 does not divide 2 key-value heads"),
        ((1, 1, 1), {"train__length": 1000}, "--train.length: 1000; the target ends at"),
        ((1, 1, 1), {"loss__vocabulary": 12}, "--loss.vocabulary: 12, and the target has 11 tokens; 11 or fewer is"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(mesh, changes, told):
    config = runs.changed(runs.CONFIG, **changes)
    with pytest.raises(UserError) as caught:
        compatible.check_run(config, tiny.TARGET, AbstractMesh(mesh, sharding.AXES))
    assert str(caught.value).startswith(told)


def test_a_part_of_the_vocabulary_divides_over_the_mesh():
    with pytest.raises(UserError, match=r"^--loss.vocabulary: 9 tokens do not divide over --mesh.tensor, 2; a"):
        compatible._check_vocabulary(9, 11, 2)


def test_what_fits_is_let_through():
    compatible.check_run(runs.CONFIG, tiny.TARGET, AbstractMesh((1, 1, 1), sharding.AXES))
