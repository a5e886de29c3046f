"""DFlash, block-diffusion speculative decoding: models and algorithms as pure functions of arrays."""
