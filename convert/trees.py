"""Parameter trees, and the same as flat dictionaries whose keys are paths joined with slashes."""

from collections.abc import Iterable
from typing import Any

import jax


def flatten(tree: Any) -> dict[str, Any]:
    """Return every leaf by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in keys): leaf for keys, leaf in leaves}


def nest(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the nested dictionary whose leaves are given with their paths."""
    tree: dict[str, Any] = {}
    for path, leaf in items:
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
