import jax
import pytest

from convert import processes
from dflash_jax.errors import UserError


@pytest.fixture
def started(monkeypatch):
    """Start with no word of other processes; record what jax is told of them."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(processes, "_silence_libraries", lambda: None)
    for name in (processes.ADDRESS, processes.COUNT, processes.INDEX, *processes.LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_alone_there_is_nobody_to_find(started, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    processes.join()
    assert started == []


@pytest.mark.parametrize(
    ("name", "value"), [("SLURM_NTASKS", "4"), ("OMPI_COMM_WORLD_SIZE", "2"), ("TPU_WORKER_HOSTNAMES", "a,b")]
)
def test_launchers_are_recognised(started, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    processes.join()
    assert started == [(None, None, None)]


def test_three_variables_say_who_is_there(started, monkeypatch):
    for name, value in ((processes.ADDRESS, "host:1234"), (processes.COUNT, "3"), (processes.INDEX, "0")):
        monkeypatch.setenv(name, value)
    processes.join()
    assert started == [("host:1234", 3, 0)]


@pytest.mark.parametrize(
    ("count", "index", "reason"),
    [
        (None, "0", "JAX_NUM_PROCESSES: not set; JAX_COORDINATOR_ADDRESS needs it"),
        ("2", None, "JAX_PROCESS_ID: not set"),
        ("two", "0", "JAX_NUM_PROCESSES: 'two'; a whole number"),
        ("2", "2", "JAX_PROCESS_ID: 2 of JAX_NUM_PROCESSES 2; 0 to 1 is right"),
    ],
)
def test_what_is_missing_is_named(started, monkeypatch, count, index, reason):
    monkeypatch.setenv(processes.ADDRESS, "host:1234")
    for name, value in ((processes.COUNT, count), (processes.INDEX, index)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=reason):
        processes.join()
    assert started == []


def test_an_address_has_a_port(started, monkeypatch):
    monkeypatch.setenv(processes.ADDRESS, "nonsense")
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS: 'nonsense'; host:port"):
        processes.join()


def test_processes_that_do_not_meet_are_told_in_a_line(started, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(UserError, match=r"did not find one another \(DEADLINE_EXCEEDED"):
        processes.join()
