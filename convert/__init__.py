"""Checkpoints of every format, in and out: the one place that reads and writes them."""

import signal
import sys
from pathlib import Path

# While the modules of a command of ours are imported, which `python -m` and an installed command begin like this, a
# Ctrl-C just ends it: raised in the middle of an import it would be a traceback, or be lost. `cli.run` takes over.
if (
    Path(*sys.argv[:1]).name.startswith("dflash-")
    or (
        sys.argv[:1] == ["-m"]
        and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0]
        in ("benchmarks", "convert", "inference", "training")
    )
) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from convert.load import LoadedDraft, LoadedTarget, load_draft, load_target, load_tokenizer

__all__ = ["LoadedDraft", "LoadedTarget", "load_draft", "load_target", "load_tokenizer"]
