"""English and Chinese say the same: pages, headings, code, names, links, terms.

What the code blocks do is tested in test_readme.py; where the links lead, in test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
PAGES = [*PAIRS.values()]  # each in English and in Chinese


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def terms() -> list[tuple[list[str], list[str], list[str]]]:
    """Of each row: the English words, the Chinese words, the words that are not written."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$", TEXT["terms"], re.M)
    assert len(rows) == len(re.findall(r"^\| ", TEXT["terms"], re.M)) > 50
    return [(en.split(", "), zh.split("、"), wrong.split()) for en, zh, wrong in rows[1:]]


def test_a_page_stands_in_both_languages_each_linked_to_the_other() -> None:
    for page, translated in PAGES:
        for one, label, target in ((page, "中文", translated), (translated, "English", page)):
            title, empty, link, after, *_ = read(one).splitlines()
            assert re.fullmatch("# .+", title), one
            assert (empty, link, after) == ("", f"[{label}]({target.name})", ""), one


def test_no_chinese_page_stands_alone() -> None:
    assert {*DOCS.rglob("*.zh.md")} <= {other for _, other in PAGES}


def test_both_have_the_same_headings_code_and_tables() -> None:
    for page, other in PAGES:
        english, translated = shape(read(page)), shape(read(other))
        assert translated == english, other


def shape(text: str) -> dict[str, Any]:
    """What does not depend on the language."""
    starts = (r"^\|", r"^ *- ", r"^ *\d+\. ", r"^!\[", r"^::: ")  # rows, items, pictures
    return {
        "headings": [level for level, _ in headings(text)],
        "code": [fence for fence in fences(text) if fence[0] in SAME],
        "blocks": [kind for kind, _ in fences(text)],
        **{start: len(re.findall(start, text, re.M)) for start in starts},
    }


def test_both_show_the_same_text_but_for_the_lines_that_are_translated() -> None:
    for page, other in PAGES:
        shown, other_shown = (code_of(read(p), "text") for p in (page, other))
        for english, translated in zip(shown, other_shown, strict=True):
            lines = [line for line in translated.splitlines() if not re.search(HAN, line)]
            same = [line.replace("、", ", ") for line in lines]
            assert [line for line in same if line not in english.splitlines()] == [], other
            if len(lines) < len(translated.splitlines()):
                names = re.findall(r"\w+(?:[._/-]\w+)+", english)
                assert [name for name in names if name not in translated] == [], other
            else:
                assert len(lines) == len(english.splitlines()), other


def test_the_chinese_names_what_the_english_names() -> None:
    for page, other in PAGES:
        names, other_names = (
            {*re.findall(r"`([^`\n]+)`", without_code(read(p)))} for p in (page, other)
        )
        assert names - other_names == set(), other


def test_the_chinese_leads_to_the_chinese_of_what_the_english_leads_to() -> None:
    translated = {page for page, _ in PAGES}
    for page, other in PAGES:
        found = targets(other)
        expected = {
            (chinese(file) if file in translated else file, has_heading)
            for file, has_heading in targets(page)
        }
        # The line with the link to the other language is the one that differs.
        expected -= {(chinese(other), False), (other, False)}
        assert found - {(page, False)} == expected, other


def targets(page: Path) -> set[tuple[Path, bool]]:
    """The files that a page leads to, and whether to a heading of it."""
    found = (target.partition("#") for target in links(page))
    return {
        ((page.parent / path).resolve() if path else page, bool(heading))
        for path, _, heading in found
    }


def test_a_link_of_a_chinese_page_has_a_chinese_label() -> None:
    for _, other in PAGES:
        labels = re.findall(r"\[([^]]*)\]\([^)]*\.zh\.md", without_code(read(other)))
        assert [label for label in labels if label.endswith(".md")] == [], other


def test_the_chinese_has_the_words_of_the_terms_and_none_that_is_not_written() -> None:
    rows = terms()
    for page, other in PAGES:
        english, translated = prose(read(page)), prose(read(other))
        for words, translations, wrong in rows:
            assert [word for word in wrong if word in translated] == [], other
            alternatives = "|".join(word.removeprefix("to ") for word in words)
            times = len(re.findall(rf"\b(?:{alternatives})(?:s|es)?\b", english, re.I))
            has_one = any(word in translated for word in translations)
            assert times < OFTEN or has_one, (other, words)


def test_chinese_prose_has_chinese_punctuation_and_spaces_round_latin_words() -> None:
    for _, other in PAGES:
        text = re.sub(r"`[^`\n]*`", "x", without_code(read(other)))
        for wrong in (f"{HAN}(?:[,;?!(]|:(?!{HAN}))", f"(?:{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN})"):
            assert re.findall(f".{{0,9}}{wrong}.{{0,9}}", text) == [], other


def test_the_terms_are_one_page_for_both() -> None:
    assert all(name in ENGLISH and not chinese(ENGLISH[name]).exists() for name in ONE_FOR_BOTH)
