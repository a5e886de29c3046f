"""Pictures of a benchmark's report, as SVG that the page's style sheet colours."""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from inference.display import VISIBLE

# As wide as a phone's screen, so that text keeps its size there; wider screens show several side by side.
WIDTH = 360
ROW, BAR, LINE = 44, 16, 16
HEIGHT, TOP, FLOOR = 180, 22, 150
NEAR = 45  # where a line would cross the figure beside a bar
LETTERS = 44  # of 12 pixels, in WIDTH
WITH_SIGNS = 10  # more columns than these have no room for per-cent signs
NEITHER_TEXT = re.compile("[\ud800-\udfff\ufffe\uffff]")


class Bar(NamedTuple):
    """A bar: its label, its length (None: nothing to show), and the figure written beside it."""

    label: str
    value: float | None
    figure: str


class Part(NamedTuple):
    """A part of a whole: its name, its seconds and the style that colours it."""

    name: str
    seconds: float
    style: str


def escape(text: str) -> str:
    """Make any text safe to stand in the page, between tags or in an attribute."""
    return html.escape(NEITHER_TEXT.sub("\N{REPLACEMENT CHARACTER}", text.translate(VISIBLE)))


def bars(title: str, rows: Sequence[Bar], mark: float) -> str:
    """Draw a bar a row, from left to right, and a line at the value to compare them with."""
    most = max([mark, *(row.value or 0.0 for row in rows)])
    room = WIDTH - 60
    at = room * mark / most
    drawn = []
    for i, row in enumerate(rows):
        y = i * ROW + LINE
        width = room * (row.value or 0.0) / most
        drawn += [
            _text(0, y - 4, row.label),
            f'<rect class="drafted" x="0" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 2}" y2="{y + BAR + 2}"/>',
            _text(max(width, at if abs(width - at) < NEAR else 0) + 6, y + 13, row.figure, "figure"),
        ]
    return _svg(title, len(rows) * ROW, drawn)


def columns(title: str, shares: Sequence[float | None], most: float = 1.0) -> str:
    """Draw a column for each share, numbered from 1; one of `most` is as high as the picture."""
    step = WIDTH / max(1, len(shares))
    sign = "%" if len(shares) <= WITH_SIGNS else ""
    drawn = [f'<line class="axis" x1="0" x2="{WIDTH}" y1="{FLOOR}" y2="{FLOOR}"/>']
    for i, share in enumerate(shares):
        middle = (i + 0.5) * step
        height = (FLOOR - TOP) * (share or 0.0) / most
        figure = "–" if share is None else f"{100 * share:.0f}{sign}"
        drawn += [
            f'<rect class="drafted" x="{middle - 0.36 * step:.1f}" y="{FLOOR - height:.1f}" width="{0.72 * step:.1f}" '
            f'height="{height:.1f}" rx="2"/>',
            _text(middle, FLOOR - height - 5, figure, "figure middle small"),
            _text(middle, FLOOR + 16, str(i + 1), "middle"),
        ]
    return _svg(title, HEIGHT, drawn)


def stack(title: str, parts: Sequence[Part]) -> str:
    """Draw the parts of a whole in one bar, and a legend below it."""
    whole = sum(max(0.0, part.seconds) for part in parts) or 1.0
    x, drawn = 0.0, []
    for i, part in enumerate(parts):
        share = max(0.0, part.seconds) / whole
        y = 62 + i * 26
        drawn += [
            f'<rect class="{part.style}" x="{x:.1f}" y="8" width="{share * WIDTH:.1f}" height="28"/>',
            f'<rect class="{part.style}" x="0" y="{y - 11}" width="13" height="13" rx="2"/>',
            _text(22, y, part.name),
            _text(WIDTH - 60, y, f"{part.seconds:.2f} s", "figure end"),
            _text(WIDTH, y, f"{share:.0%}", "figure end"),
        ]
        x += share * WIDTH
    return _svg(title, 62 + len(parts) * 26, drawn)


def _text(x: float, y: float, text: str, style: str = "") -> str:
    styled = f' class="{style}"' if style else ""
    return f'<text{styled} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(title: str, height: int, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg>"
    )
