"""Checkpoints of every format, in and out: the one place that reads and writes them."""

from convert.load import LoadedDraft, LoadedTarget, load_draft, load_target, load_tokenizer

__all__ = ["LoadedDraft", "LoadedTarget", "load_draft", "load_target", "load_tokenizer"]
