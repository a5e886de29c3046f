"""One command in several processes, each with its own devices: all run alike, and the first one speaks."""

import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import progress
from dflash_jax.errors import NotNowError, UserError, check

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# Set by GKE and by whoever else knows the hosts of a TPU slice; a list of one says that there are no others.
TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# Set by launchers to how many processes or slices they started, or to a list of hosts; jax finds the rest by itself.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", *TPU_HOSTS, "MEGASCALE_NUM_SLICES")
NODES, NODE, NODE_IPS = "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"
PORT = os.environ.get("JAX_COORDINATOR_PORT", "8482")  # as jax has it on TPUs
# jax sets it when it is imported where no TPU is; elsewhere users set it.
NO_METADATA = "TPU_SKIP_MDS_QUERY"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
METADATA_TRIES, METADATA_SECONDS = 3, 5
# Seconds for all to be there: a machine that replaces another may have an image to fetch.
PATIENCE = 1800


class _Others(NamedTuple):
    """What says that there are other processes, and what jax is told of them; it finds out what is None."""

    source: str
    first: str | None = None  # host:port
    processes: int | None = None
    this: int | None = None


def join() -> None:
    """Find the other processes, if there are some. It must run before jax looks for devices.

    JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID say so, or a
    launcher's variables do, or, on a TPU VM, the metadata of its slice.

    Raises:
        UserError: a variable is missing or no number.
        NotNowError: the processes do not find one another.
    """
    others = _told() or _launched() or _on_tpu_slice() or _on_skypilot()
    if others is None:
        return
    # It would take SIGTERM for itself, and only note it; training has a way of its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(others.first, others.processes, others.this, initialization_timeout=PATIENCE)
    except (RuntimeError, ValueError, OSError) as error:
        raise NotNowError(f"{others.source}: the processes did not find one another ({error}){_proxies()}") from error
    _keep_output_for_results()
    if not first():
        progress.hush()


def first() -> bool:
    """Say whether this process is the one that speaks and writes."""
    return jax.process_index() == 0


def agree(number: int) -> int:
    """Return the first process's number in all of them."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else number


def by_first(do: Callable[[], Any]) -> None:
    """Do something in the first process, which all others wait for.

    Raises:
        UserError: it did not work; the first process says why.
    """
    fault: Exception | None = None
    if first():
        try:
            do()
        except Exception as error:  # whatever it is, the others must not wait for ever
            fault = error
    status = agree(0 if fault is None else getattr(fault, "status", UserError.status))
    if fault is not None:
        raise fault
    if status:
        kind = NotNowError if status == NotNowError.status else UserError
        raise kind("the first process of the run failed, and says why")


def _proxies() -> str:
    """Return what to add to a fault where a proxy may be in the way; jax's own warning is not shown."""
    names = ", ".join(sorted(name for name in os.environ if name.lower() in PROXIES))
    return f"; {names} may stand between them: unset, or with the hosts in no_proxy, is right" if names else ""


def _told() -> _Others | None:
    address = os.environ.get(ADDRESS)
    launched = any(os.environ.get(launcher) for launcher in LAUNCHERS)
    if not address:
        alone = [name for name in (COUNT, INDEX) if os.environ.get(name)]
        check(not alone or launched, f"{ADDRESS}: not set; {', '.join(alone)} needs it beside it")
        return None
    check(bool(re.fullmatch(r".+:\d+", address)), f"{ADDRESS}: {address!r}; host:port of the first process is right")
    # A launcher that jax knows may say the rest in its own way.
    count, index = (None if launched and name not in os.environ else _number(name, ADDRESS) for name in (COUNT, INDEX))
    if count is not None and index is not None:
        check(0 <= index < count, f"{INDEX}: {index} of {COUNT} {count}; 0 to {count - 1} is right")
    return _Others(f"{ADDRESS} {address}", address, count, index)


def _launched() -> _Others | None:
    return next((_Others(name) for name in LAUNCHERS if _several(os.environ.get(name, ""))), None)


def _on_tpu_slice() -> _Others | None:
    """Ask Google Cloud, as jax will, but first for how many hosts there are: a TPU VM of its own has none to join."""
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    if "tpu" not in platforms or any(os.environ.get(name) for name in (NO_METADATA, *TPU_HOSTS)):
        return None
    hosts = _metadata("worker-network-endpoints")
    slices = re.search(r"^MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env"), re.MULTILINE)
    several = _several(hosts) or (slices is not None and _several(slices[1]))
    return _Others("metadata of the TPU") if several else None


def _on_skypilot() -> _Others | None:
    if not _several(os.environ.get(NODES, "")):
        return None
    count, index = _number(NODES), _number(NODE, NODES)
    ips = os.environ.get(NODE_IPS, "").split()
    check(len(ips) == count, f"{NODE_IPS}: {len(ips)} addresses; {count}, as {NODES} says, is right")
    return _Others(NODES, f"{ips[0]}:{PORT}", count, index)


def _metadata(key: str) -> str:
    """Return what Google Cloud knows of this machine, nothing where it knows nothing or is not there at all."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    reason: OSError | None = None
    for attempt in range(METADATA_TRIES):
        time.sleep(attempt)
        try:
            with direct.open(request, timeout=METADATA_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return ""
            reason = error
        except OSError as error:
            if isinstance(getattr(error, "reason", None), socket.gaierror):
                return ""
            reason = error
    raise NotNowError(
        f"{host}: does not say which hosts this TPU has ({reason}); {NO_METADATA}=1 is right where it is alone"
    )


def _keep_output_for_results() -> None:
    """Keep standard output for results: gloo, which connects CPU processes, writes to it behind Python's back."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.stdout = results


def _number(name: str, needed_by: str = "") -> int:
    text = os.environ.get(name)
    check(text is not None, f"{name}: not set; {needed_by} needs it beside it")
    try:
        return int(text or "")
    except ValueError as error:
        raise UserError(f"{name}: {text!r}; a whole number is right") from error


def _several(value: str) -> bool:
    return "," in value or (value.isdecimal() and int(value) > 1)
