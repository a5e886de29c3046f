"""Decoding: the engine and its commands."""
