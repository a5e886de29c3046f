"""Turn chats into token ids and loss masks: `python -m training.prepare --help`."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from convert import cli, progress
from convert.demo_target import find_demo_target
from convert.files import about, locked
from convert.load import stop_token_ids, target_config
from convert.progress import tell
from convert.rows import BOM, read_row, utf8
from convert.sources import Source, open_source
from dflash_jax.errors import UserError, check
from training import prepared
from training.chats import ROW, Language, documents
from training.prepared import open_prepared

EXAMPLE = f"""\
example:
  python -m training.prepare --target Qwen/Qwen3-4B --data chats.jsonl --output chats-prepared

Each row of --data is {ROW}.
Killed at any time, the same command goes on with what is there.
"""
LOCK = ".lock"
LINES = 1_000  # of a shard
LONGEST_LINE = 1 << 28
# A worker takes seconds to start; less text than this is done sooner without one.
TEXT_OF_A_WORKER = 16 << 20


class Cut(NamedTuple):
    """The part of the input that one shard is made from."""

    number: int
    start: int
    size: int
    first_line: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes shards of cuts of the input."""

    data: Path
    output: Path
    settings: str
    language: Language

    def is_made(self, cut: Cut) -> bool:
        """Say whether a shard is there that was made from the same lines, with the same settings."""
        return prepared.is_written(self.output, cut.number, self._made_from(cut))

    def make(self, cut: Cut) -> None:
        """Write a shard.

        Raises:
            UserError: a row that is not right, an input that changed, or no room.
        """
        with about(self.data), self.data.open("rb") as file:
            file.seek(cut.start)
            content = file.read(cut.size)
        same = hashlib.sha256(content).hexdigest() == cut.sha256
        check(same, f"{self.data}: it changed while it was read; a file that nothing writes to is right")
        prepared.write_shard(self.output, cut.number, self._made_from(cut), self._rows(content, cut))

    def _rows(self, content: bytes, cut: Cut) -> Iterator[tuple[int, list[int], list[bool]]]:
        for number, line in enumerate(content.split(b"\n"), cut.first_line):
            text = line.removeprefix(BOM)
            if not text.strip():
                continue
            where = f"{self.data}, line {number}"
            for document in documents(read_row(utf8(text, where), where, ROW), where, self.language):
                yield number, *document

    def _made_from(self, cut: Cut) -> str:
        return f"{self.settings}, line {cut.first_line}, {cut.sha256}"


def main(argv: Sequence[str]) -> None:
    """Prepare the chats that the arguments name.

    Raises:
        UserError: whatever the user got wrong, in one line.
    """
    args = _parser().parse_args(argv)
    for flag, name in (("--target", args.target), ("--data", args.data), ("--output", args.output)):
        check(name != "", f"{flag}: empty; a name is right")
    data, output = Path(args.data), Path(args.output)
    check(os.path.isfile(data), f"--data {data}: no such file; a JSONL file of chats is right")
    target = args.target or str(find_demo_target("--target"))
    language = _language(open_source(target), thinking=args.thinking)
    if args.thinking and "enable_thinking" not in str(language.tokenizer.chat_template):
        tell("--thinking: the chat template has no such switch")
    settings = _settings(language)
    with _alone(output):
        tell(f"reading {data.name}")
        cuts, input_hash = cut_up(data)
        made_from = {**settings, "input_hash": input_hash}
        if (output / prepared.MANIFEST).exists():
            _check_finished(output, made_from)
            tell(f"--output {output}: there already, made from the same")
        else:
            maker = Maker(data, output, json.dumps(settings, sort_keys=True), language)
            _make_all(maker, target, cuts, args.workers)
            prepared.finish(output, len(cuts), {"target": target, "input": data.name, **made_from})
    counts = open_prepared(output).manifest["counts"]
    print(
        f"{output}: {counts['rows']:,} rows, {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
        f"{counts['supervised_tokens'] / counts['tokens']:.1%} supervised"
    )


def cut_up(data: Path) -> tuple[list[Cut], str]:
    """Return the parts of a file, each of so many lines that are not blank, and a digest of it all.

    Raises:
        UserError: a file that cannot be read, or has no rows.
    """
    cuts: list[Cut] = []
    whole, part = hashlib.sha256(), hashlib.sha256()
    start = size = rows = 0
    first_line = line_number = 1
    with about(data), data.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            check(
                len(line) < LONGEST_LINE,
                f"line {line_number}: longer than {LONGEST_LINE:,} bytes; a row for each chat is right",
            )
            line_number += 1
            whole.update(line)
            part.update(line)
            size += len(line)
            rows += bool(line.removeprefix(BOM).strip())
            if rows == LINES:
                cuts.append(Cut(len(cuts), start, size, first_line, part.hexdigest()))
                start, size, rows, first_line, part = start + size, 0, 0, line_number, hashlib.sha256()
    if rows:
        cuts.append(Cut(len(cuts), start, size, first_line, part.hexdigest()))
    check(bool(cuts), f"{data}: empty; a row {ROW} for each chat is right")
    return cuts, whole.hexdigest()


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m training.prepare",
        description="Turn chats into token ids and a mask of those that the target answers with.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--target", metavar="T", help="checkpoint whose tokenizer and chat template it is (default: the demo's)"
    )
    parser.add_argument("--data", metavar="CHATS.jsonl", required=True, help="a chat a row")
    parser.add_argument("--output", metavar="DIR", required=True, help="directory to write, or to go on with")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="prompts let the target think first, and answers may hold its thoughts (default: no)",
    )
    parser.add_argument("--workers", type=_whole, metavar="N", help="processes (default: as many as are of use)")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number of 1 or more is right")
    return int(text)


def _language(source: Source, *, thinking: bool) -> Language:
    config = target_config(source)
    return Language(source.tokenizer(), stop_token_ids(source, config), config.vocab_size, thinking)


def _settings(language: Language) -> dict[str, Any]:
    """Return what the manifest says of how rows were made, beside the input."""
    return {
        "tokenizer_hash": prepared.tokenizer_hash(language.tokenizer),
        "template_hash": prepared.template_hash(language.tokenizer),
        "stop_token_ids": list(language.stop_token_ids),
        "vocab_size": language.vocab_size,
        "thinking": language.thinking,
    }


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Make the output's directory, keep other runs from it, and leave nothing half written in it.

    Raises:
        UserError: it holds other things, or another run writes it.
    """
    new = not os.path.lexists(output)
    check(new or os.path.isdir(output), f"--output {output}: no directory; one, or a new name, is right")
    with about(f"--output {output}", "written"):
        lock = _lock(output)
        prepared.sweep(output)
    with lock:
        try:
            yield
        finally:
            prepared.sweep(output)
            if new and [file.name for file in output.iterdir()] == [LOCK]:
                (output / LOCK).unlink()
                output.rmdir()


def _lock(output: Path) -> contextlib.ExitStack:
    """Return what keeps other runs out until it is closed."""
    output.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in output.iterdir()} - {LOCK}
    others = sorted(name for name in names if not prepared.OURS.fullmatch(name))
    check(not others, f"holds other things ({', '.join(others[:3])}); a new name is right")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(output / LOCK))
        return stack.pop_all()


def _check_finished(output: Path, made_from: dict[str, Any]) -> None:
    manifest = open_prepared(output).manifest
    for name, value in made_from.items():
        what = name.removesuffix("_hash").replace("_", " ")
        check(
            manifest.get(name) == value,
            f"--output {output}: finished already, and made with another {what}; another name is right",
        )


def _make_all(maker: Maker, target: str, cuts: list[Cut], workers: int | None) -> None:
    pending = [cut for cut in cuts if not maker.is_made(cut)]
    if len(pending) < len(cuts):
        tell(f"{len(cuts) - len(pending)} of {len(cuts)} shards are there already")
    useful = sum(cut.size for cut in pending) // TEXT_OF_A_WORKER
    processes = min(workers or min(os.cpu_count() or 1, useful), len(pending))
    with contextlib.ExitStack() as running:
        if processes > 1:
            making = running.enter_context(_pool(maker, target, pending, processes))
        else:
            making = map(maker.make, pending)
        for _ in progress.show(making, len(pending), f"preparing {maker.data.name}, shards of {LINES:,} rows"):
            pass


@contextlib.contextmanager
def _pool(maker: Maker, target: str, cuts: list[Cut], processes: int) -> Iterator[Iterator[None]]:
    """Make shards in worker processes, which end with this one however it ends."""
    spawn = multiprocessing.get_context("spawn")  # a fork would not have the tokenizer's threads
    # Not the tokenizer itself: sending it waits until a worker has started, and so one would start after the other.
    told = maker.data, maker.output, maker.settings, target, maker.language.thinking
    with concurrent.futures.ProcessPoolExecutor(processes, spawn, _start_worker, told) as pool:
        try:
            # A terminal interrupts all of its processes; workers, which inherit this, leave it to the first.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                # Not `map`, which cancels what is left: a pool whose workers are ended stumbles over that.
                futures = [pool.submit(_make, cut) for cut in cuts]
            finally:
                signal.signal(signal.SIGINT, handler)
            yield (future.result() for future in futures)
        except BrokenProcessPool as error:
            raise UserError("--workers: one of them was killed, perhaps for memory; fewer is right") from error
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()  # what it was writing is not missed
            raise


def _start_worker(data: Path, output: Path, settings: str, target: str, thinking: bool) -> None:
    global _worker  # noqa: PLW0603 - how an initializer hands something to a pool's tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = Maker(data, output, settings, _language(open_source(target), thinking=thinking))


def _end_with_parent() -> None:
    """End this process when the one that started it was killed; a pool's workers would wait for it forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_worker: Maker


def _make(cut: Cut) -> None:
    _worker.make(cut)


if __name__ == "__main__":
    cli.run(main)
