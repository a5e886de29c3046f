"""Checkpoints by hub id: safetensors, configs and tokenizers, never pickles or code."""

import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from dflash_jax.errors import NotNowError, UserError

WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
UNWANTED = ["*/*"]


def fetch(name: str, wanted: Sequence[str] = WANTED) -> Path:
    """Return the directory that holds a hub model, from the cache or, unless HF_HUB_OFFLINE is set, from the hub.

    Args:
        name: owner/name.
        wanted: patterns of the files to fetch.

    Raises:
        UserError: no such model, one that needs a login, or no way to it.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=UNWANTED))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name}: this hub model asks for a login; `hf auth login`, or a token in HF_TOKEN, is right"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such path, and no such model on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.is_offline_mode()
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        kind = UserError if offline else NotNowError
        raise kind(f"{name}: no such path, and as a hub id not in the cache while {reason}") from error
    except Exception as error:  # whatever the library's ways to the hub raise
        raise UserError(f"{name}: no such path, and as a hub id not to be had ({error})") from error
