"""What the tests of the documentation share: its pages in both languages, their code and links.

A page is known by its path in docs/ without a suffix: "config", "moving/parakeet". "README" is
the one at the top, "experiments/ctr/README" one beside an experiment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ONE_FOR_BOTH = ("terms", "tests/benchmarks/README")  # of two languages; for whoever measures
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    root = DOCS if DOCS in page.parents else ROOT
    return str(page.relative_to(root).with_suffix(""))


ENGLISH = {
    _name(page): page
    for page in [
        ROOT / "README.md",
        *sorted(ROOT.glob("experiments/*/README.md")),
        ROOT / "tests/benchmarks/README.md",
        *sorted(DOCS.rglob("*.md")),
    ]
    if not page.name.endswith(".zh.md")
}
TEXT = {name: page.read_text(encoding="utf-8") for name, page in ENGLISH.items()}


def chinese(page: Path) -> Path:
    """The Chinese page beside an English one."""
    name = "README.zh-CN.md" if page.name == "README.md" else f"{page.stem}.zh.md"
    return page.with_name(name)


PAIRS = {n: (page, chinese(page)) for n, page in ENGLISH.items() if n not in ONE_FOR_BOTH}
BOTH = [*ENGLISH.values(), *(other for _, other in PAIRS.values() if other.exists())]


def fences(text: str) -> list[tuple[str, str]]:
    """The language and the content of each fenced block."""
    return _FENCE.findall(text)


def code_of(text: str, language: str) -> list[str]:
    """The content of the blocks of one language."""
    return [content for kind, content in fences(text) if kind == language]


def blocks(page: str, language: str) -> list[str]:
    """`code_of` an English page, by its name."""
    return code_of(TEXT[page], language)


SCRIPT = blocks("README", "python")[0]


def without_code(text: str) -> str:
    """Without fenced blocks."""
    return _FENCE.sub("", text)


def prose(text: str) -> str:
    """Without code, what is set as code, links' targets and names of docstrings."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|^::: .*", "", without_code(text), flags=re.MULTILINE)


def headings(text: str) -> list[tuple[int, str]]:
    """The level and the text of each heading."""
    found = re.findall(r"^(#+) (.*)", without_code(text), re.MULTILINE)
    return [(len(marks), heading) for marks, heading in found]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it: letters of any script, digits, hyphens."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def links(page: Path) -> Iterator[str]:
    """The targets of its links; none out of the repository."""
    for target in _LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if not target.startswith(("https://", "http://")):
            yield target


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of a table, by how its first row begins; without that row."""
    lines = text.split(f"\n| {head}")[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not row[0].startswith("---")]
