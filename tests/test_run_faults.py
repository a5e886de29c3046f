"""Runs as users have them, killed, stopped, and let down by their disks: no checkpoint is lost, no message unclear."""

import concurrent.futures
import contextlib
import functools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import runs

pytestmark = pytest.mark.slow
# Checkpoints at every step, so that much of a run's life is spent saving.
CONFIG = runs.changed(runs.CONFIG, checkpoint__every=1)
SPARSE = runs.changed(runs.CONFIG, checkpoint__every=1_000, evaluation__every=1_000)
AT_ONCE = 2  # runs
PROGRESS = re.compile(
    r"reading (target|target: \d+ of \d+)|compiling|going on after step \d+|step \d+ of 20: .*|"
    r"\d+ documents to train on, .*|stopped after step \d+, which is saved; .*|--output \S+: all 20 steps are taken .*"
)


class Place:
    """Where runs are, and what all of them must come to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = runs.write_target(path / "target")
        self.data = runs.write_prepared(path / "prepared")
        self.whole = path / "whole"
        self.life = 0.0
        self.wrong: list[str] = []
        self.faults = self.kills_while_saving = 0

    def told_by(self, output: Path) -> Path:
        """Where a run's standard error goes: not onto its disk, which may be full."""
        return self.path / f"{output.name}.stderr"

    def start(self, output: Path, config: Any = CONFIG, data: Path | None = None, **options: Any) -> subprocess.Popen:
        """Begin a run. Programs are compiled once and for all."""
        made = runs.command(self.target, data or self.data, output, config=config)
        made["env"] |= {
            "JAX_COMPILATION_CACHE_DIR": str(self.path / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with self.told_by(output).open("w") as told:
            return subprocess.Popen(**made, **options, stdout=subprocess.DEVNULL, stderr=told)

    def end(self, process: subprocess.Popen, output: Path, what: str, *statuses: int) -> str:
        """Wait for a run to end; return its error, if it has one. All that is unclear about it is wrong."""
        process.wait(300)
        others = [line for line in self.told_by(output).read_text().splitlines() if not PROGRESS.fullmatch(line)]
        errors = [line for line in others if line.startswith("error: ")]
        if process.returncode not in statuses or others != errors or len(errors) != (process.returncode in (2, 75)):
            self.wrong.append(f"{what}: status {process.returncode}, {others}")
        return errors[0] if errors else ""

    def run(self, what: str, *statuses: int, output: Path, **options: Any) -> str:
        """Run to the end."""
        return self.end(self.start(output, **options), output, what, *statuses)

    def saved(self, output: Path, what: str, had: list[int]) -> list[int]:
        """Return the checkpoints that are there, whole and to the bit, among them all that were there before."""
        there = runs.checkpoints(output) if (output / "checkpoints").exists() else []
        if not set(had) <= set(there):
            self.wrong.append(f"{what}: checkpoints {sorted(set(had) - set(there))} are lost")
        for step in set(there) - set(had):
            if runs.bits(output, step) != runs.bits(self.whole, step):
                self.wrong.append(f"{what}: checkpoint {step} has other bits")
        return there

    def finish(self, output: Path, what: str, config: Any = CONFIG) -> None:
        """Let the run go on to its end, and compare it with the one that nothing happened to."""
        self.run(what, 0, output=output, config=config)
        draft = "draft/model.safetensors"
        if runs.bits(output, 20) != runs.bits(self.whole, 20) or runs.metrics(output) != runs.metrics(self.whole):
            self.wrong.append(f"{what}: gone on with, it is another run")
        elif (output / draft).read_bytes() != (self.whole / draft).read_bytes():
            self.wrong.append(f"{what}: another draft")
        shutil.rmtree(output)

    def stopped_at(self, step: int, name: str) -> Path:
        """A run that was stopped after a step."""
        output = self.path / name
        shutil.copytree(self.whole, output)
        shutil.rmtree(output / "draft")
        for later in range(step + 1, 21):
            shutil.rmtree(output / "checkpoints" / str(later))
        return output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("faults"))
    made.run("the first", 0, output=made.path / "first")  # compiles
    begun = time.monotonic()
    made.run("the whole", 0, output=made.whole)
    made.life = time.monotonic() - begun
    assert made.wrong == []
    return made


def all_at_once(place: Place, cases: Sequence[Callable[[], None]], capsys: Any) -> None:
    place.wrong, place.faults = [], 0
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(case) for case in cases]:
            done.result()
    with capsys.disabled():
        print(f"\n{place.faults} faults in {time.monotonic() - begun:.0f} s, of which wrong: {place.wrong}")
    assert place.wrong == []


def wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
    """Wait until something holds, or the process has ended."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def test_killed_at_ten_moments_and_gone_on_with_it_is_the_same_run_to_the_bit(place, capsys):
    rng = random.Random(0)

    def between_saves(number: int) -> None:
        """Somewhere within the steps, most of which are not saved."""
        output, what = place.path / f"between-{number}", f"killed within the steps, {number}"
        config, step, later = runs.CONFIG, rng.randint(1, 19), rng.random() * 0.02
        process = place.start(output, config)
        lines = output / "metrics.jsonl"
        assert wait_for(process, lambda: lines.exists() and lines.read_bytes().count(b"\n") >= step)
        time.sleep(later)
        kill(output, what, process, config)

    def while_saving(number: int) -> None:
        output, what, step = place.path / f"saving-{number}", f"killed while saving, {number}", rng.randint(2, 20)
        for _ in range(5):
            process = place.start(output)
            assert wait_for(process, lambda: bool(list(output.glob(f"checkpoints/{step}.*tmp*"))))
            time.sleep(rng.random() * 0.03)
            process.kill()
            if list(output.glob("checkpoints/*tmp*")):
                place.kills_while_saving += 1
                kill(output, what, process, CONFIG)
                return
            process.wait()
            shutil.rmtree(output)
        raise AssertionError("it was never killed while saving")

    def kill(output: Path, what: str, process: subprocess.Popen, config: Any) -> None:
        process.kill()
        place.end(process, output, what, -signal.SIGKILL)
        place.faults += 1
        place.saved(output, what, [])
        place.finish(output, what, config)

    place.kills_while_saving = 0
    cases = [functools.partial(between_saves if i % 2 else while_saving, i) for i in range(10)]
    all_at_once(place, cases, capsys)
    assert (place.faults, place.kills_while_saving) == (10, 5)


def test_faults_lose_no_checkpoint_and_are_told_in_one_line(place, capsys):
    cases = [killed(place, 8), stopped(place, 6), two_at_once(place), *damaged(place), *data_damaged(place)]
    all_at_once(place, cases, capsys)
    assert place.faults == 8 + 6 + 1 + 6 + 3


def killed(place: Place, times: int) -> Callable[[], None]:
    def case() -> None:
        """One run, killed at any moment of its life, again and again."""
        rng, output = random.Random(1), place.path / "killed"
        had: list[int] = []
        for number in range(times):
            what = f"killed, {number}"
            process = place.start(output)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(place.life * (0.5 + 0.5 * rng.random() if number % 2 else rng.random()))
            process.kill()
            place.end(process, output, what, -signal.SIGKILL, 0)
            place.faults += 1
            had = place.saved(output, what, had)
        place.finish(output, f"killed {times} times")

    return case


def stopped(place: Place, times: int) -> Callable[[], None]:
    def case() -> None:
        rng, output = random.Random(2), place.path / "stopped"
        had: list[int] = []
        for number in range(times):
            what, sent = f"stopped, {number}", (signal.SIGTERM, signal.SIGINT)[number % 2]
            process = place.start(output)
            # From when its own handlers are there; before, the interpreter's are.
            assert wait_for(process, lambda: place.told_by(output).stat().st_size > 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(place.life * 0.7 * rng.random())
            process.send_signal(sent)
            place.end(process, output, what, 0, 128 + sent)
            place.faults += 1
            had = place.saved(output, what, had)
        place.finish(output, f"stopped {times} times")

    return case


def two_at_once(place: Place) -> Callable[[], None]:
    def case() -> None:
        output = place.path / "two"
        first = place.start(output)
        assert wait_for(first, (output / "config.json").exists)
        place.told_by(output).rename(place.told_by(output).with_suffix(".first"))
        told = place.run("the second of two", 75, output=output)
        place.told_by(output).with_suffix(".first").rename(place.told_by(output))
        place.faults += 1
        if told != f"error: --output {output}: another run is in it; waiting for that, or another name, is right":
            place.wrong.append(f"the second of two: {told}")
        place.end(first, output, "the first of two", 0)
        place.finish(output, "the first of two")

    return case


def damaged(place: Place) -> list[Callable[[], None]]:
    """The newest checkpoint's files, by what damages them."""
    ways: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda content: content[: len(content) // 2],
        "emptied": lambda content: b"",
        "flipped": lambda content: content[: len(content) // 2] + b"\xaa\x55" + content[len(content) // 2 + 2 :],
    }

    def case(number: int, pattern: str, way: str) -> None:
        output, what = place.stopped_at(10, f"damaged-{number}"), f"{pattern} {way}"
        checkpoint = output / "checkpoints" / "10"
        file = max(checkpoint.glob(pattern), key=lambda file: file.stat().st_size)
        file.write_bytes(ways[way](file.read_bytes()))
        told = place.run(what, 2, output=output)
        place.faults += 1
        right = f"error: {checkpoint}: not readable as a checkpoint of this run ("
        if not told.startswith(right) or not told.endswith("); removing it, to go on from the one before, is right"):
            place.wrong.append(f"{what}: {told}")
        shutil.rmtree(checkpoint)
        place.saved(output, what, list(range(1, 10)))
        if number % 3 == 0:
            place.finish(output, what)

    largest, index = "state/ocdbt.process_0/d/*", "state/d/*"
    files = [(largest, "cut"), (largest, "flipped"), (index, "cut"), (index, "flipped")]
    files += [("state/_METADATA", "emptied"), ("data/metadata", "cut")]
    return [functools.partial(case, i, *one) for i, one in enumerate(files)]


def data_damaged(place: Place) -> list[Callable[[], None]]:
    ways: dict[str, Callable[[Path], Any]] = {
        "cut": lambda shard: os.truncate(shard, shard.stat().st_size // 2),
        "gone": lambda shard: shard.unlink(),
        "overwritten": lambda shard: shard.write_bytes(os.urandom(shard.stat().st_size)),
    }

    def case(way: str) -> None:
        output, what, data = place.stopped_at(10, f"data-{way}"), f"data {way}", place.path / f"prepared-{way}"
        shutil.copytree(place.data, data)
        [shard] = data.glob("*.array_record")
        ways[way](shard)
        told = place.run(what, 2, output=output, data=data)
        place.faults += 1
        if not told.startswith(f"error: {shard}: ") or not told.endswith("is right"):
            place.wrong.append(f"{what}: {told}")
        place.saved(output, what, list(range(1, 11)))
        place.finish(output, what)

    return [functools.partial(case, way) for way in ways]


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=False)
    if made.returncode != 0:
        pytest.skip("a small disk may not be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes free."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    free = shutil.disk_usage(disk).free
    ballast.write_bytes(b"\0" * max(free - left, 0))


def test_a_full_disk_loses_no_checkpoint_and_is_told_in_one_line(place, small_disk, capsys):
    sparse = {"config": SPARSE}
    # What the run was at, how much was left to it, and what of it must be in the message.
    cases: list[tuple[str, int, int, dict[str, Any], str]] = [
        ("saving", 10, 40_000, {}, "checkpoints: a checkpoint cannot be written (No space left on device); those"),
        ("saving", 10, 120_000, {}, "checkpoints: a checkpoint cannot be written (No space left on device); those"),
        ("saving", 10, 400_000, {}, "checkpoints: a checkpoint cannot be written (No space left on device); those"),
        ("logging", 10, 4_096, sparse, "cannot be written (No space left on device)"),
        ("logging", 10, 8_192, sparse, "cannot be written (No space left on device)"),
        ("going on", 10, 0, {}, "cannot be written (No space left on device)"),
        ("exporting", 20, 0, {}, "draft: cannot be written ("),
        ("exporting", 20, 12_000, {}, "draft: cannot be written ("),
        ("beginning", 0, 0, {}, "cannot be written (No space left on device)"),
    ]

    def each() -> None:
        for number, (at, step, left, options, message) in enumerate(cases):
            what = f"full while {at}, {left} bytes left"
            if step:
                output = Path(shutil.move(place.stopped_at(step, f"full-{number}"), small_disk / "run"))
                had = list(range(1, step + 1))
            else:
                (output := small_disk / "run").mkdir()
                had = []
            fill(small_disk, left)
            told = place.run(what, 2, output=output, **options)
            place.faults += 1
            if message not in told or str(output) not in told:
                place.wrong.append(f"{what}: {told}")
            place.saved(output, what, had)
            (small_disk / "ballast").unlink()
            if number % 2 == 0:
                place.finish(output, what)
            else:
                shutil.rmtree(output)

    all_at_once(place, [each], capsys)
    assert place.faults == 9


def test_files_that_may_not_grow_lose_no_checkpoint_and_are_told_in_one_line(place, capsys):
    def case(number: int, most: int, message: str) -> None:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        what, output = f"files up to {most} bytes", place.stopped_at(10, f"limited-{number}")
        told = place.run(what, 2, output=output, preexec_fn=limit)
        place.faults += 1
        if message not in told or str(output) not in told:
            place.wrong.append(f"{what}: {told}")
        place.saved(output, what, list(range(1, 11)))
        place.finish(output, what)

    limits = [(20_000, "checkpoints: a checkpoint cannot be written (File too large)"), (2_000, "cannot be written")]
    all_at_once(place, [functools.partial(case, i, *one) for i, one in enumerate(limits)], capsys)
    assert place.faults == 2
