"""Draw curve.svg from the logs of the runs beside this file: `python docs/demo-draft/draw.py`."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
RUNS = ((1, 2), (3, 4), (5,))  # by the documents that they hold out
STEP = 2 * 1024  # tokens
LEFT, TOP, RIGHT, BOTTOM = 56, 24, 570, 296
LOWEST, HIGHEST = 2.0, 3.6  # acceptance lengths
TRAINING, HELD_OUT, GREY = "#9bb8d3", "#c0392b", "#444"
Point = tuple[float, float]


def main() -> None:
    """Write the picture."""
    (HERE / "curve.svg").write_text(picture())


def picture() -> str:
    """Return acceptance length over minutes of training, at anchors trained on and at held-out ones."""
    curves, starts, held_out, minutes = [], [], [], 0.0
    for group in RUNS:
        held_out.append([])
        for number in group:
            starts.append((number, minutes))
            lines = [(minutes + spent, line) for spent, line in _timed(number)]
            curves.append([(at, line["acceptance_length"]) for at, line in lines])
            name = "evaluation_acceptance_length"
            held_out[-1] += [(at, line[name]) for at, line in lines if name in line]
            minutes = lines[-1][0]
    body = [*_axes(minutes), *itertools.chain.from_iterable(_begin(*start, minutes) for start in starts)]
    body += [_line([_place(*point, minutes) for point in curve], TRAINING, 1.5) for curve in curves]
    for points in held_out:
        placed = [_place(*point, minutes) for point in points]
        body.append(_line(placed, HELD_OUT, 2))
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{HELD_OUT}"/>' for x, y in placed]
    for name, color, value in (
        ("held out", HELD_OUT, held_out[-1][-1][1]),
        ("training", "#5b84ad", curves[-1][-1][1]),
    ):
        body.append(f'<text x="580" y="{_place(0, value, 1)[1] + 4:.1f}" fill="{color}">{name} {value:.2f}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 340" font-family="sans-serif" font-size="12" '
    title = 'role="img">\n<title>Acceptance length over minutes of training</title>\n'
    return head + title + "\n".join(['<rect width="720" height="340" fill="#fff"/>', *body]) + "\n</svg>\n"


def _timed(number: int) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the lines of a run's log, each with the minutes since its beginning."""
    minutes = step = 0.0
    for text in (HERE / f"run-{number}.jsonl").read_text().splitlines():
        line = json.loads(text)
        minutes += (line["step"] - step) * STEP / line["tokens_per_second"] / 60
        step = line["step"]
        yield minutes, line


def _place(minute: float, length: float, minutes: float) -> Point:
    across, up = minute / minutes, (length - LOWEST) / (HIGHEST - LOWEST)
    return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def _line(points: Sequence[Point], color: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _begin(number: int, minute: float, minutes: float) -> Iterator[str]:
    x, _ = _place(minute, LOWEST, minutes)
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#bbb" stroke-dasharray="3 3"/>'
    yield f'<text x="{x + 3:.1f}" y="{TOP - 8}" fill="{GREY}">{number}</text>'


def _axes(minutes: float) -> Iterator[str]:
    for tenths in range(round(10 * LOWEST), round(10 * HIGHEST) + 1, 2):
        _, y = _place(0, tenths / 10, minutes)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{tenths / 10:.1f}</text>'
    for minute in range(0, int(minutes) + 1, 20):
        x, _ = _place(minute, LOWEST, minutes)
        yield f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="{GREY}">{minute}</text>'
    middle, told = (LEFT + RIGHT) / 2, "minutes of training, two CPU cores"
    yield f'<text x="{middle:.0f}" y="{BOTTOM + 38}" text-anchor="middle" fill="{GREY}">{told}</text>'


if __name__ == "__main__":
    main()
