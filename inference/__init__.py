"""Decoding: the engine and its commands."""

import convert  # noqa: F401 - before all else, for what a Ctrl-C then does
