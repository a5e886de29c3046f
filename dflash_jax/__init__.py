"""DFlash, block-diffusion speculative decoding: models and algorithms as pure functions of arrays."""

__version__ = "0.1.0"
