"""English and Chinese say the same: pages, headings, code blocks, links to each other, terms.

What the code blocks do is tested in test_readme.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONE_FOR_BOTH = ("terms.md",)
ENGLISH = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if not page.name.endswith(".zh.md") and page.name not in ONE_FOR_BOTH
    ),
]
SAME = ("python", "bash", "yaml")


def chinese(page: Path) -> Path:
    """The Chinese page beside an English one."""
    name = "README.zh-CN.md" if page.name == "README.md" else f"{page.stem}.zh.md"
    return page.with_name(name)


PAIRS = [pytest.param(page, chinese(page), id=str(page.relative_to(ROOT))) for page in ENGLISH]


def fences(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Without code, links' targets and what is set as code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def headings(text: str) -> list[int]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def terms() -> list[tuple[list[str], list[str], list[str]]]:
    """Of each row: the English words, the Chinese words, the words that are not written."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$", (ROOT / "docs/terms.md").read_text(), re.M
    )
    return [(en.split(", "), zh.split("、"), wrong.split()) for en, zh, wrong in rows[1:]]


@pytest.mark.parametrize(("page", "other"), PAIRS)
def test_a_page_stands_in_both_languages_each_linked_to_the_other(page: Path, other: Path) -> None:
    assert other.exists()
    assert page.read_text().splitlines()[2] == f"[中文]({other.name})"
    assert other.read_text().splitlines()[2] == f"[English]({page.name})"


@pytest.mark.parametrize(("page", "other"), PAIRS)
def test_both_have_the_same_headings_and_code(page: Path, other: Path) -> None:
    english, chinese_text = page.read_text(), other.read_text()
    assert headings(chinese_text) == headings(english)
    code, other_code = (
        [f for f in fences(text) if f[0] in SAME] for text in (english, chinese_text)
    )
    assert other_code == code
    assert len(fences(chinese_text)) == len(fences(english))
    rows, other_rows = (len(re.findall(r"^\|", text, re.M)) for text in (english, chinese_text))
    assert other_rows == rows


@pytest.mark.parametrize(("page", "other"), PAIRS)
def test_the_chinese_uses_the_terms_and_links_to_chinese_pages(page: Path, other: Path) -> None:
    text = prose(other.read_text())
    assert [w for _, _, wrong in terms() for w in wrong if w in text] == []
    targets = re.findall(r"\]\(([^)#]+\.md)", other.read_text())
    english = [
        target
        for target in targets
        if chinese(other.parent / target).exists() and target != page.name
    ]
    assert english == []
