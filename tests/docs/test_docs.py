"""What the pages name is there: keys, mixins, methods, options, messages, tests, files, links, nav.

The code and the commands of the pages: test_readme.py. The two languages: test_languages.py.
The page of the architecture: test_architecture.py.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import inspect
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import (
    BOTH,
    DOCS,
    ENGLISH,
    ONE_FOR_BOTH,
    PAIRS,
    ROOT,
    TEXT,
    blocks,
    headings,
    links,
    rows,
    slug,
)
from screens import texts
from test_readme import parser_of_tools

from expbase import ExperimentBase, default_argument_parser
from expbase.cli import add_options_of_main
from expbase.extras import mixins
from expbase.record.visualizer import Visualizer
from expbase.training import resolved

# --- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "head"), [("config.md", "`training.` key"), ("config.zh.md", "`training.` 的键")]
)
def test_the_table_of_keys_holds_every_key_its_default_and_what_it_becomes(
    page: str, head: str
) -> None:
    config = ExperimentBase.default_config()
    by_epochs = copy.deepcopy(config)
    by_epochs.training.max_epoch = 3
    used = [resolved(given).training for given in (config, by_epochs)]
    expected = {key: (str(value), {str(each[key]) for each in used} - {str(value)})
                for key, value in config.training.items()}  # fmt: skip
    expected["max_epoch"] = ("0", set())  # given, above
    table = {}
    for names, value, _ in rows((DOCS / page).read_text(encoding="utf-8"), head):
        default, _, becomes = value.replace("（", " (").partition(" (")
        numbers = {*re.findall(r"\b\d+\b", becomes)}
        table |= {name: (default.strip('"'), numbers) for name in names.split(", ")}
    assert table == expected


def parser_of_main() -> argparse.ArgumentParser:
    parser = default_argument_parser()
    add_options_of_main(parser)
    return parser


def test_the_table_of_options_holds_every_option() -> None:
    named = {
        word
        for option, _ in rows(TEXT["config"], "option")
        for word in re.findall(r"--\w+", option)
    }
    options = {word for a in parser_of_main()._actions for word in a.option_strings}
    assert named == {option for option in options if option.startswith("--")} - {"--help"}


def test_the_table_of_mixins_holds_their_defaults() -> None:
    table = {name.strip("`"): text for name, text in rows(TEXT["events"], "mixin")}
    common = {*ExperimentBase.default_config()}
    sections = {
        name: {*cls.default_config()} - common
        for name, cls in vars(mixins).items()
        if inspect.isclass(cls) and cls.__module__ == mixins.__name__
        if issubclass(cls, ExperimentBase)
    }
    assert table.keys() == {name for name, own in sections.items() if own}
    for name, text in table.items():
        (section,) = sections[name]
        assert text.startswith(f"`{section}`: ")
        for key, value in getattr(mixins, name).default_config()[section].items():
            assert f"{key} {json.dumps(value)}" in text, (name, key)


def test_the_words_of_the_card_and_of_the_log_are_those_that_come() -> None:
    words = [
        word for row in rows(TEXT["looking"], "word") for word in re.findall("`(.+?)`", row[0])
    ]
    shown = "\n".join(texts(DOCS / "live.svg"))
    said = [word for word in words if not re.search(rf"(?<!\S){re.escape(word)}(?!\S)", shown)]
    assert said == ["CONTINUING", "STOPPED", "FINISHED", "not exact"]
    assert [word for word in said if not any(word in text for text in literals())] == []
    card = re.findall(r"^[\d:]+ ([a-z.]+)  +", shown, re.M)
    assert {*card} <= {*words}


def test_the_signatures_of_the_board_s_methods_are_those_of_the_code() -> None:
    for page in PAIRS["looking"]:
        text = page.read_text(encoding="utf-8")
        shown = dict(re.findall(r"^\| `(add_\w+)\((.*?)\)` \|", text, re.M))
        assert shown.keys() == {name for name in dir(Visualizer) if name.startswith("add_")}
        for name, given in shown.items():
            parameters = [*inspect.signature(getattr(Visualizer, name)).parameters.values()]
            defaults = [f"*, {p.name}={p.default}" for p in parameters if p.kind is p.KEYWORD_ONLY]
            positional = [p.name for p in parameters[1:] if p.kind is not p.KEYWORD_ONLY]
            assert given == ", ".join([*positional, *defaults])
            assert f"board.{name}(" in text


# Of Paddle, of Python and of gloo: what stands first in a line of the page of trouble.
THEIRS = (
    "(signal",
    "attempted relative",
    "Cannot create a consistent",
    "Unexpected BUS",
    "gloo",
    "PreconditionNotMet",
    "Please set",
)


def test_every_message_that_begins_a_line_of_the_page_of_trouble_is_one_of_expbase() -> None:
    own, _, of_paddle = TEXT["trouble"].partition("## Messages of Paddle")
    said = "\n".join(literals())
    first = "\n".join(re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", own, re.MULTILINE))
    quoted = re.findall(r"`([^`]+)`", first)
    messages = [text for text in quoted if " " in text and not text.startswith(THEIRS)]
    assert of_paddle
    assert len(messages) > 10
    assert [text for text in messages if not pattern(text).search(said)] == []


def pattern(message: str) -> re.Pattern[str]:
    """A message of a page, in which … stands for what is put in."""
    return re.compile(".{1,80}?".join(map(re.escape, message.strip("… ").split("…"))))


@functools.cache
def literals() -> frozenset[str]:
    """The texts in the code of expbase, with … for what is put in."""
    found = set()
    for path in (ROOT / "expbase").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (isinstance(part, ast.Constant) and part.value for part in node.values)
                found.add("".join(str(part or "…") for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%\w|\{[^}]*\}", "…", node.value))
    return frozenset(found)


# --- names -----------------------------------------------------------------------------------

_OPTION = r"(?<![\w-])--[a-z][a-z_]+"
OURS = [page for page in BOTH if page.parent.name != "moving"]  # those name what others have


def test_every_option_that_a_page_names_exists() -> None:
    parser = parser_of_tools()
    (tools,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    helps = parser_of_main().format_help()
    helps += "".join(tool.format_help() for tool in tools.values())
    launchers = (
        "nproc_per_node nnodes master host rank job_id max_restart elastic_level elastic_timeout"
    )
    slurms = "nodes ntasks time signal requeue open"  # --open-mode, --ntasks-per-node
    dockers = "shm"  # --shm-size
    proofs = "only faults every keep rows count short"
    pips = "no force"  # --no-deps, --force-reinstall
    theirs = {f"--{name}" for name in f"{launchers} {slurms} {dockers} {proofs} {pips}".split()}
    known = {*re.findall(_OPTION, helps)} | theirs
    pages = {page: {*re.findall(_OPTION, page.read_text(encoding="utf-8"))} for page in OURS}
    assert len(set.union(*pages.values())) > 30
    assert {page: named - known for page, named in pages.items() if named - known} == {}


def test_every_test_that_a_page_names_exists() -> None:
    named = [
        name
        for page in BOTH
        for name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 20
    for file, function in named:
        (place,) = (ROOT / "tests").rglob(file)
        text = place.read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, (file, function)


def test_every_module_that_a_page_names_exists() -> None:
    for page in OURS:
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
            places = [ROOT / "expbase" / name, ROOT / name, page.parent / name]
            is_test = any((ROOT / "tests").rglob(name))
            known = any(place.exists() for place in places) or is_test
            assert known or name in ("train.py", "file.py", "plain.py"), (page, name)


def test_every_page_that_the_code_names_exists() -> None:
    named = [
        (path, name)
        for path in (ROOT / "expbase").rglob("*.py")
        for name in re.findall(r"docs/([\w/]+)\.md", path.read_text(encoding="utf-8"))
    ]
    assert named
    assert [(path, name) for path, name in named if name not in TEXT] == []


# --- sizes and outputs -----------------------------------------------------------------------


def test_the_pages_show_what_the_tools_print() -> None:
    texts = literals()
    printed = [
        re.compile("(.+)".join(map(re.escape, text.split("…"))))
        for text in texts
        if re.match(r" *\w+", text) and re.search(r"\w{5}", text)
    ]

    def is_printed(line: str) -> bool:
        # What is put in is a text of ours as well, or a name and numbers.
        return any(
            all(
                part in texts or re.search(r"\d", part) or re.fullmatch(r"\S+", part)
                for part in put
            )
            for text in printed
            if (found := text.fullmatch(line))
            for put in [found.groups()]
        )

    for page in ("resume", "running"):
        shown = [t for t in blocks(page, "text") if "config.yaml" not in t]  # that one lists files
        lines = [line for text in shown for line in text.splitlines() if line.strip() != "…"]
        assert len(lines) > 2, page
        said = [line.removeprefix("WARNING: ") for line in lines]
        said = [line for line in said if "smoke test" not in line]  # test_readme.py runs it
        assert [line for line in said if not is_printed(line)] == [], page


def test_the_log_lines_of_the_pictures_are_some_of_today() -> None:
    said = "\n".join(literals())
    lines = [row for name in ("promise", "live") for row in texts(DOCS / f"{name}.svg")]
    written = re.findall(r"^\d\d:\d\d:\d\d (?:\[\d+\] )?([a-zA-Z]+)", "\n".join(lines), re.M)
    assert {"experiment", "versions", "saved", "CONTINUING", "FINISHED"} <= {*written}
    assert [word for word in written if word not in said] == []


PROVED = re.compile(
    r"^\| .+ \| \[(\w+)\.py\]\(\.\./tests/proofs/\1\.py\) \| (.+) \| "
    r"(\d{4}-\d\d-\d\d) \| (\d+\.\d+\.\d+) \|$",
    re.M,
)


def test_the_page_of_proofs_has_what_each_script_counted_in_both_languages_the_same() -> None:
    pages = ("proofs.md", "proofs.zh.md")
    english, chinese = (PROVED.findall((DOCS / p).read_text(encoding="utf-8")) for p in pages)
    scripts = sorted((ROOT / "tests/proofs").glob("*.py"))
    counting = {path.stem for path in scripts if "ArgumentParser(" in path.read_text()}
    counting -= {"on_device"}  # which device.py starts
    assert sorted(name for name, *_ in english) == sorted(counting)
    for (name, text, *rest), (other, chinese_text, *chinese_rest) in zip(
        english, chinese, strict=True
    ):
        assert (name, *rest) == (other, *chinese_rest)
        assert re.findall(r"\d+", text) == re.findall(r"\d+", chinese_text)


# --- links and the site ----------------------------------------------------------------------


BESIDE = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    for page in BOTH + BESIDE:
        for target in links(page):
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), (page, target)
            assert not heading or heading in anchors(file), (page, target)


@functools.cache
def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {slug(heading) for _, heading in headings(text)} | {*chain(*kept(text))}


def kept(text: str) -> list[list[str]]:
    """Of each link to a heading that has moved to another page: the anchors that it had here."""
    found = re.findall(r'^- ((?:<a id="[^"]+"></a>)+)\[[^]]+\]\([^)]+\)', text, re.MULTILINE)
    return [re.findall('"(.+?)"', anchors_there) for anchors_there in found]


MOVED = {  # headings of 1.0 that stand on another page now
    "performance": [
        "a-whole-experiment",
        "a-batch-the-loop-a-line",
        "the-start-and-a-resume",
        "a-checkpoint",
        "two-processes",
        "shares",
        "memory",
        "on-a-device",
        "how-it-grows",
        "after-a-fault",
    ],
    "resume": [
        "the-ways-out",
        "errors",
        "what-is-walked",
        "what-is-restored",
        "what-on_train_begin-sets",
        "what-is-told-and-when",
        "what-is-refused-at-the-save",
        "what-continues-to-the-same-bits",
        "other-bits-and-the-log-says-so",
        "other-bits-and-only-verify-shows-it",
        "proofs",
    ],
    "validation": ["samples-and-pictures", "export", "averaged-weights", "weights-alone"],
}


def test_an_old_address_of_a_heading_that_has_moved_leads_to_a_link_to_it() -> None:
    for name, page in PAIRS.items():
        english, translated = (kept(path.read_text(encoding="utf-8")) for path in page)
        assert [*chain(*english)] == MOVED.get(name, [])
        assert [*map(len, translated)] == [*map(len, english)], name


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_leads_to_every_page_or_to_the_first_one_of_its_folder(name: str) -> None:
    found = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / name)}
    suffix = ".md" if name == "README.md" else ".zh.md"
    expected = {
        DOCS / f"{page}{suffix if page not in ONE_FOR_BOTH else '.md'}"
        for page in ENGLISH
        if page != "README" and ("/" not in page or page.endswith("/index"))
    }
    assert expected - found == set()


def test_every_page_is_in_the_nav_once_and_has_a_chinese_name_there() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Site)
    entries = [*leaves(site["nav"])]
    pages = [page for _, page in entries]
    assert sorted(pages) == sorted(f"{page}.md" for page in ENGLISH if "README" not in page)
    (languages,) = (plugin["i18n"]["languages"] for plugin in site["plugins"] if "i18n" in plugin)
    titles = {title for title, _ in entries if title} | {*groups(site["nav"])}
    assert {*languages[1]["nav_translations"]} == titles


def groups(nav: list[Any]) -> Iterator[str]:
    """The title of each group, also of those within another one."""
    for item in nav:
        if isinstance(item, dict):
            for title, content in item.items():
                if isinstance(content, list):
                    yield title
                    yield from groups(content)


def leaves(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Title and page of each entry, in the order of the site; a group's own page has no title."""
    for item in nav:
        for title, content in [("", item)] if isinstance(item, str) else item.items():
            yield from leaves(content) if isinstance(content, list) else [(title, content)]


class _Site(yaml.SafeLoader):
    """Reads mkdocs.yml, in which the names of Python's objects do not matter here."""


_Site.add_multi_constructor("!ENV", lambda loader, tag, node: None)
_Site.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: None)
