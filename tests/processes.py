"""Modules run in several processes that know of one another, each with fake devices of its own."""

import os
import socket
import subprocess
import sys

PATIENCE = 600  # seconds
# Most of the time of tests is compiling.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment(devices, **more):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false {QUICK}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | more


def start(count, devices, *arguments, last=()):
    """Start a module in so many processes; the last one has arguments of its own, too."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = []
    for index in range(count):
        several = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", *arguments, *(last if index == count - 1 else ())],
                env=environment(devices, **(several if count > 1 else {})),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return running


def end(running):
    """Return statuses, and what was printed and told."""
    told = [process.communicate(timeout=PATIENCE) for process in running]
    return [process.returncode for process in running], [out for out, _ in told], [err for _, err in told]


def run(count, devices, *arguments, last=()):
    """Start, and wait for the end."""
    return end(start(count, devices, *arguments, last=last))
