"""Screens of a terminal as SVG: a still, or a recording that moves by CSS alone.

    still(["$ ls", "a  b"], columns=80)
    moving([Frame(0.0, [Row("$ ls")]), Frame(0.4, [Row("$ ls"), Row("a  b")])], columns=80)

A recording begins with its last frame, then moves through all of them, once, and stays at the last.
The file has no script and no font. Where nothing moves (a reader who wants no motion, a program
that knows no animation) the last frame is shown. It is a dark terminal on any page.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
CELL = 9.6  # px, of a character
LINE = 22  # px
MARGIN = 18  # px
BAR = 36  # px, above the first row
HOLD_SECONDS = 7.0  # of the last frame
_STYLE = """\
text{font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#c9d1d9}
.c{fill:#fff;font-weight:bold}.n{fill:#d9a94c;font-style:italic}.k{fill:#ff7b72;font-weight:bold}
.g{fill:#7ee787}.b{fill:#79c0ff}.p{fill:#d2a8ff}.d{fill:#8b949e}"""


@dataclass(frozen=True)
class Row:
    """A line of the screen, and a note of ours at its right end."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Frame:
    """What stands on the screen from a time on.

    Attributes:
        seconds: Since the beginning of the recording.
    """

    seconds: float
    rows: Sequence[Row]


def texts(path: Path, everything: bool = False) -> list[str]:
    """The rows of a picture, from above: those of its last screen, or all that it ever has."""
    return [
        "".join(text.itertext()).replace("\N{NO-BREAK SPACE}", " ")
        for group in ET.parse(path).getroot().findall(f"{SVG}g")
        if everything or group.get("visibility") != "hidden"
        for text in group.findall(f"{SVG}text")
        if text.get("class") != "n"
    ]


def still(lines: Sequence[str], columns: int) -> str:
    """One screen."""
    rows = [_drawn(number, Row(line), columns) for number, line in enumerate(lines)]
    return _window(columns, len(lines), _STYLE, rows)


def moving(frames: Sequence[Frame], columns: int) -> str:
    """A recording, which begins with its last frame, to be seen at once, and is shown once."""
    end = frames[-1].seconds + HOLD_SECONDS
    names: dict[str, str] = {}
    drawn = []
    for number in range(max(len(frame.rows) for frame in frames)):
        for row, start, stop in _spans(frames, number):
            steps = _steps(start / end, None if stop is None else stop / end)
            name = names.setdefault(steps, f"f{len(names)}")
            attributes = f'class="m" style="animation-name:{name}"'
            if stop is not None:
                attributes += ' visibility="hidden"'
            drawn.append(_drawn(number, row, columns, attributes))
    style = [
        _STYLE,
        f".m{{animation:{end:.2f}s step-end {-frames[-1].seconds:.2f}s 2}}",
        *(f"@keyframes {name}{{{steps}}}" for steps, name in names.items()),
        "@media (prefers-reduced-motion:reduce){.m{animation:none}}",
    ]
    return _window(columns, max(len(frame.rows) for frame in frames), "\n".join(style), drawn)


def _spans(frames: Sequence[Frame], number: int) -> Iterator[tuple[Row, float, float | None]]:
    """What stands in a row of the screen, from when to when; None: to the end."""
    row, start = Row(""), 0.0
    for frame in frames:
        now = frame.rows[number] if number < len(frame.rows) else Row("")
        if now != row:
            if row != Row(""):
                yield row, start, frame.seconds
            row, start = now, frame.seconds
    if row != Row(""):
        yield row, start, None


def _steps(start: float, stop: float | None) -> str:
    """The keyframes of what is visible from one part of the time to another."""
    steps = [] if start == 0 else ["0%{visibility:hidden}"]
    steps.append(f"{start:.2%}{{visibility:visible}}")
    if stop is not None:
        steps.append(f"{stop:.2%}{{visibility:hidden}}")
    return "".join(steps)


def _drawn(number: int, row: Row, columns: int, attributes: str = "") -> str:
    y = BAR + LINE * number + 16
    width = f'textLength="{CELL * len(row.text):.1f}" lengthAdjust="spacingAndGlyphs"'
    text = f'<text x="{MARGIN}" y="{y}" {width}>{_coloured(row.text)}</text>'
    if row.note:
        right = MARGIN + CELL * columns
        text += (
            f'<text x="{right:.1f}" y="{y}" text-anchor="end" class="n">{escape(row.note)}</text>'
        )
    return f"<g {attributes}>{text}</g>".replace("<g >", "<g>")


def _coloured(text: str) -> str:
    text = escape(text, quote=False)
    text = re.sub(r"^(\$ )(.*)", r'<tspan class="g">\1</tspan><tspan class="c">\2</tspan>', text)
    text = re.sub(r"(Killed)$", r'<tspan class="k">\1</tspan>', text)
    text = re.sub(r"(CONTINUING .*|FINISHED)", r'<tspan class="g">\1</tspan>', text)
    text = re.sub(r"^(\d\d:\d\d:\d\d|⋮)", r'<tspan class="d">\1</tspan>', text)
    text = re.sub(r"^([0-9a-f]{40})(?=.*model)", r'<tspan class="b">\1</tspan>', text)
    text = re.sub(r"^([0-9a-f]{40})", r'<tspan class="p">\1</tspan>', text)
    return re.sub(r" (?=[^<>]*(<|$))", "\N{NO-BREAK SPACE}", text)  # of several one would stay


def _window(columns: int, rows: int, style: str, drawn: Sequence[str]) -> str:
    width = round(2 * MARGIN + CELL * columns)
    height = BAR + LINE * rows + MARGIN
    dots = "".join(
        f'<circle cx="{MARGIN + 5 + 18 * number}" cy="18" r="5.5" fill="{colour}"/>'
        for number, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    box = f'width="{width - 1}" height="{height - 1}" rx="8" fill="#161b22" stroke="#30363d"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n<style>\n{style}\n</style>\n'
        f'<rect x="0.5" y="0.5" {box}/>{dots}\n' + "\n".join(drawn) + "\n</svg>\n"
    )
