"""English and Chinese say the same: pages, headings, code, names, links, terms.

What the code blocks do is tested in test_readme.py; where the links lead, in test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import (
    DOCS,
    ENGLISH,
    ONE_FOR_BOTH,
    PAIRS,
    TEXT,
    chinese,
    code_of,
    fences,
    headings,
    links,
    prose,
    without_code,
)

SAME = ("python", "bash", "yaml")
HAN = "[\u4e00-\u9fff]"
OFTEN = 3  # times that a page uses a term: then its Chinese word is there, too
pages = pytest.mark.parametrize(("page", "other"), PAIRS.values(), ids=[*PAIRS])


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def terms() -> list[tuple[list[str], list[str], list[str]]]:
    """Of each row: the English words, the Chinese words, the words that are not written."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$", TEXT["terms"], re.M)
    assert len(rows) == len(re.findall(r"^\| ", TEXT["terms"], re.M)) > 50
    return [(en.split(", "), zh.split("、"), wrong.split()) for en, zh, wrong in rows[1:]]


@pages
def test_a_page_stands_in_both_languages_each_linked_to_the_other(page: Path, other: Path) -> None:
    for one, label, target in ((page, "中文", other), (other, "English", page)):
        title, empty, link, after, *_ = read(one).splitlines()
        assert re.fullmatch("# .+", title)
        assert (empty, link, after) == ("", f"[{label}]({target.name})", "")


def test_no_chinese_page_stands_alone() -> None:
    assert {*DOCS.rglob("*.zh.md")} <= {other for _, other in PAIRS.values()}


@pages
def test_both_have_the_same_headings_code_and_tables(page: Path, other: Path) -> None:
    english, translated = read(page), read(other)
    levels, other_levels = ([level for level, _ in headings(t)] for t in (english, translated))
    assert other_levels == levels
    code, other_code = ([f for f in fences(t) if f[0] in SAME] for t in (english, translated))
    assert other_code == code
    kinds, other_kinds = ([kind for kind, _ in fences(t)] for t in (english, translated))
    assert other_kinds == kinds
    for start in (r"^\|", r"^ *- ", r"^ *\d+\. ", r"^!\[", r"^::: "):  # rows, items, pictures
        count, other_count = (len(re.findall(start, t, re.M)) for t in (english, translated))
        assert other_count == count, start


@pages
def test_both_show_the_same_text_but_for_the_lines_that_are_translated(
    page: Path, other: Path
) -> None:
    shown, other_shown = (code_of(read(p), "text") for p in (page, other))
    for english, translated in zip(shown, other_shown, strict=True):
        lines = [line for line in translated.splitlines() if not re.search(HAN, line)]
        same = [line.replace("、", ", ") for line in lines]
        assert [line for line in same if line not in english.splitlines()] == []
        if len(lines) < len(translated.splitlines()):
            names = re.findall(r"\w+(?:[._/-]\w+)+", english)
            assert [name for name in names if name not in translated] == []
        else:
            assert len(lines) == len(english.splitlines())


@pages
def test_the_chinese_names_what_the_english_names(page: Path, other: Path) -> None:
    names, other_names = (
        {*re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", read(p), flags=re.S | re.M))}
        for p in (page, other)
    )
    assert names - other_names == set()


@pages
def test_the_chinese_leads_to_the_chinese_of_what_the_english_leads_to(
    page: Path, other: Path
) -> None:
    translated = {page for page, _ in PAIRS.values()}
    expected = set()
    for target in links(page):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        expected.add((chinese(file) if file in translated else file, bool(heading)))
    found = set()
    for target in links(other):
        path, _, heading = target.partition("#")
        found.add(((other.parent / path).resolve() if path else other, bool(heading)))
    # The line with the link to the other language is the one that differs.
    assert found - {(page, False)} == expected - {(chinese(other), False), (other, False)}


@pages
def test_a_link_of_a_chinese_page_has_a_chinese_label(page: Path, other: Path) -> None:
    labels = re.findall(r"\[([^]]*)\]\([^)]*\.zh\.md", without_code(read(other)))
    assert [label for label in labels if label.endswith(".md")] == []


@pages
def test_the_chinese_has_the_words_of_the_terms_and_none_that_is_not_written(
    page: Path, other: Path
) -> None:
    english, translated = prose(read(page)), prose(read(other))
    lacking = []
    for words, translations, wrong in terms():
        assert [word for word in wrong if word in translated] == []
        alternatives = "|".join(word.removeprefix("to ") for word in words)
        times = len(re.findall(rf"\b(?:{alternatives})(?:s|es)?\b", english, re.I))
        if times >= OFTEN and not any(word in translated for word in translations):
            lacking.append((words, times))
    assert lacking == []


@pages
def test_chinese_prose_has_chinese_punctuation_and_spaces_round_latin_words(
    page: Path, other: Path
) -> None:
    text = re.sub(r"`[^`\n]*`", "x", re.sub(r"^```.*?^```", "", read(other), flags=re.S | re.M))
    assert re.findall(rf".{{0,9}}{HAN}(?:[,;?!(]|:(?!{HAN})).{{0,9}}", text) == []
    assert re.findall(rf".{{0,9}}(?:{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN}).{{0,9}}", text) == []


def test_the_terms_are_one_page_for_both() -> None:
    assert all(name in ENGLISH and not chinese(ENGLISH[name]).exists() for name in ONE_FOR_BOTH)
