"""Documents into rows of one length, planned from their lengths alone, so that a run knows its rows beforehand."""

import bisect
from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int] | np.ndarray, room: int, seed: int) -> list[list[int]]:
    """Put every document into the row that it fills best, the longest first; those longer than a row have one each.

    Args:
        lengths: tokens of each document.
        room: tokens a row.
        seed: decides which of equally long documents meet.

    Returns:
        For each row its documents, by their place in `lengths`.

    Example:
        >>> pack([3, 9, 5], room=8, seed=0)
        [[1], [2, 0]]
    """
    sizes = np.minimum(np.asarray(lengths), room)
    order = np.random.default_rng(seed).permutation(len(sizes))
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left in them
    rooms: list[int] = []  # that some row has left, rising
    for document in order[np.argsort(-sizes[order], kind="stable")].tolist():
        size = int(sizes[document])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[at]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del open_rows[left], rooms[at]
        rows[row].append(document)
        left -= size
        if left not in open_rows:
            open_rows[left] = []
            bisect.insort(rooms, left)
        open_rows[left].append(row)
    return rows


def hold_out(lines: np.ndarray, asked: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents into those to train on and those to evaluate on, both in order.

    Args:
        lines: the line of the input that each document came from; those of one line, turns of one chat, stay together.
        asked: lines to evaluate on; a tenth of all is the most that are taken.
        seed: decides which.
    """
    rows = np.unique(lines)
    held = np.random.default_rng(seed).permutation(rows)[: min(asked, len(rows) // 10)]
    is_held = np.isin(lines, held)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)
