from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training import together


def test_each_process_compares_what_it_read_itself(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compared: list[Any] = []
    monkeypatch.setattr(together, "check_same", compared.append)
    matrix = np.ones((3, 4), np.float32)
    other = matrix.copy()
    other[2, 3] = np.nextafter(np.float32(1), np.float32(2))
    for read in (matrix, matrix.copy(), other):
        with together.read_alike(lambda path, array: jnp.asarray(array)) as place:
            np.testing.assert_array_equal(place(("layers_0", "kernel"), read), read)
    assert compared[0] == compared[1] != compared[2]
    assert list(compared[0]) == ["layers_0/kernel"]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("UNAVAILABLE: the other one is gone", 75),
        ("FAILED_PRECONDITION: Gloo all-reduce failed: connection closed by peer", 75),
        ("INTERNAL: a device failed", 1),
        ("UNIMPLEMENTED: no such kernel", 1),
    ],
)
def test_what_would_come_again_is_not_told_as_what_may_pass(capfd, told, status):
    assert together._tell(jax.errors.JaxRuntimeError(told)) == status
