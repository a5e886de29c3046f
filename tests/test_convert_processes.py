import http.server
import os
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import jax
import pytest

from convert import processes
from dflash_jax.errors import NotNowError, UserError

ALL = (
    processes.ADDRESS,
    processes.COUNT,
    processes.INDEX,
    *processes.LAUNCHERS,
    processes.NODES,
    processes.NODE,
    processes.NODE_IPS,
)


@pytest.fixture
def started(monkeypatch):
    """Start with no word of other processes; record what jax is told of them."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(processes, "_keep_output_for_results", lambda: None)
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def metadata(monkeypatch):
    """Pretend that jax has found a TPU, and answer in place of Google Cloud with what is in the dictionary."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known.setdefault("asked", []).append(key)
            status = known.get("status", 200 if key in known else 404)
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(known.get(key, "nothing").encode())

        def log_message(self, *arguments):
            pass

    jax.devices()  # looked for under the true platforms
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv(processes.NO_METADATA, raising=False)
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_address[1]}")
        jax.config.update("jax_platforms", "tpu,cpu")
        yield known
        jax.config.update("jax_platforms", platforms)
        server.shutdown()


def test_alone_there_is_nobody_to_find(started, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "1")
    processes.join()
    assert started == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("TPU_WORKER_HOSTNAMES", "a,b"),
        ("TPU_PROCESS_ADDRESSES", "a:8476,b:8476"),
        ("MEGASCALE_NUM_SLICES", "2"),
    ],
)
def test_launchers_are_recognised(started, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    processes.join()
    assert started == [(None, None, None)]


def test_slices_of_one_host_each_are_several(started, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    processes.join()
    assert started == [(None, None, None)]


@pytest.mark.parametrize(
    "known",
    [
        {"worker-network-endpoints": "a,b,c,d", "tpu-env": "WORKER_ID: '1'\n"},
        {"worker-network-endpoints": "x:1:10.0.0.1,y:2:10.0.0.2"},
        {"worker-network-endpoints": "a", "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"},
    ],
    ids=["hosts", "hosts of old", "slices"],
)
def test_a_slice_of_tpu_vms_is_recognised(started, metadata, known):
    metadata.update(known)
    processes.join()
    assert started == [(None, None, None)]


@pytest.mark.parametrize(
    "known",
    [
        {"worker-network-endpoints": "x:1:10.0.0.1", "tpu-env": "MEGASCALE_NUM_SLICES: '1'\n"},
        {"worker-network-endpoints": "a"},
        {},
    ],
    ids=["one of one slice", "one", "no TPU of Google Cloud"],
)
def test_a_tpu_vm_of_its_own_joins_nobody(started, metadata, known):
    metadata.update(known)
    processes.join()
    assert started == []
    assert metadata["asked"] == ["worker-network-endpoints", "tpu-env"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_PROCESS_ADDRESSES", "local")],
)
def test_who_knows_its_hosts_does_not_ask(started, metadata, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    processes.join()
    assert started == []
    assert "asked" not in metadata


def test_who_wants_no_tpu_does_not_ask(started, metadata):
    jax.config.update("jax_platforms", "cpu")
    processes.join()
    assert (started, metadata) == ([], {})


def test_without_a_tpu_nothing_is_asked(started, monkeypatch):
    if jax.default_backend() == "tpu":
        pytest.skip("here is one")
    # jax sets it, on import, where it finds no chip.
    assert os.environ[processes.NO_METADATA]
    monkeypatch.setattr(processes, "_metadata", lambda key: pytest.fail(f"{key} was asked for"))
    monkeypatch.setattr(processes, "first", lambda: True)
    processes.join()
    assert started == []


def test_metadata_that_fail_are_told_in_a_line(started, metadata):
    metadata["status"] = 503
    with pytest.raises(UserError, match=r"127.0.0.1:\d+: does not say which hosts .*503.*; TPU_SKIP_MDS_QUERY=1 is"):
        processes.join()
    assert len(metadata["asked"]) == processes.METADATA_TRIES


def test_a_tpu_outside_google_cloud_is_alone(started, metadata, monkeypatch):
    def unknown(*arguments, **named):
        raise urllib.error.URLError(socket.gaierror("Name or service not known"))

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", unknown)
    processes.join()
    assert started == []


def test_skypilot_is_recognised(started, monkeypatch):
    for name, value in ((processes.NODES, "2"), (processes.NODE, "1"), (processes.NODE_IPS, "10.0.0.1\n10.0.0.2")):
        monkeypatch.setenv(name, value)
    processes.join()
    assert started == [(f"10.0.0.1:{processes.PORT}", 2, 1)]


def test_a_tpu_slice_of_skypilot_is_found_by_jax(started, metadata, monkeypatch):
    metadata["worker-network-endpoints"] = "a,b"
    monkeypatch.setenv(processes.NODES, "2")
    processes.join()
    assert started == [(None, None, None)]


@pytest.mark.parametrize(
    ("node", "ips", "reason"),
    [
        (None, "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK: not set; SKYPILOT_NUM_NODES needs it"),
        ("0", "10.0.0.1", "SKYPILOT_NODE_IPS: 1 addresses; 2, as SKYPILOT_NUM_NODES says, is right"),
    ],
)
def test_what_skypilot_leaves_out_is_named(started, monkeypatch, node, ips, reason):
    monkeypatch.setenv(processes.NODES, "2")
    monkeypatch.setenv(processes.NODE_IPS, ips)
    if node is not None:
        monkeypatch.setenv(processes.NODE, node)
    with pytest.raises(UserError, match=reason):
        processes.join()
    assert started == []


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
    def fail(*arguments, **settings):
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    with pytest.raises(NotNowError) as caught:
        processes.join()
    assert str(caught.value) == (
        "SLURM_STEP_NUM_TASKS: the processes did not find one another (DEADLINE_EXCEEDED); HTTPS_PROXY may stand "
        "between them: unset, or with the hosts in no_proxy, is right"
    )
    assert caught.value.status == 75
