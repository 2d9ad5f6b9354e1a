"""The page of the architecture has the rooms, imports and places of the code; its picture fits."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest
from pages import DOCS, PAIRS, ROOT, code_of, rows
from screens import SVG
from test_house import FLOORS, LEAVES

PACKAGE = ROOT / "expbase"
PAGES = PAIRS["architecture"]
PICTURE = DOCS / "architecture.svg"


def stems(folder: Path) -> set[str]:
    """The files of a folder, without those of Python's own names."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def shown(page: Path, number: int) -> str:
    return code_of(page.read_text(encoding="utf-8"), "text")[number]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_rooms_have_every_file_once(page: Path) -> None:
    root, *rooms = re.split(r"^  ([\w/]+)/ .*\n", shown(page, 0), flags=re.M)
    named = re.findall(r"(\w+)\.py", root)
    assert sorted(named) == sorted(stems(PACKAGE) - {"__main__", "_version"})
    listed = dict(zip(rooms[::2], rooms[1::2], strict=True))
    folders = {path.parent for path in PACKAGE.glob("*/**/__init__.py")}
    # The experiments are a link to what lies beside the package.
    expected = {f for f in folders if PACKAGE / "experiments" not in (f, *f.parents)}
    assert {PACKAGE / name for name in listed} == expected
    for folder, lines in listed.items():
        names = [
            name
            for line in lines.splitlines()
            for name in re.split(", |、", re.split(": |：", line.strip())[-1])
        ]
        assert sorted(names) == sorted(stems(PACKAGE / folder)), folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_imports_are_those_that_the_house_allows(page: Path) -> None:
    floors = [line for line in shown(page, 1).splitlines() if re.search(r"\w", line)]
    names = [set(re.findall(r"\w+", floor)) for floor in floors]
    leaves = LEAVES - {"_version"}
    root = stems(PACKAGE) - LEAVES - {"__main__"}
    assert names == [{"root": root, "leaves": leaves}.get(name, {name}) for name in FLOORS]


@pytest.mark.parametrize(
    ("page", "head"), [*zip(PAGES, ("you want to know", "你想知道"), strict=True)]
)
def test_each_place_is_one_file_with_what_is_named_of_it(page: Path, head: str) -> None:
    places = [place for _, place in rows(page.read_text(encoding="utf-8"), head)]
    assert len(places) >= 15
    for place in places:
        file, *names = re.findall(r"`([^`]+)`", place)
        text = (PACKAGE / file).read_text()
        assert names
        for name in [part for dotted in names for part in dotted.split(".")]:
            assert re.search(rf"^ *(?:class|def) {name}\b", text, re.M), (file, name)


# --- the picture -----------------------------------------------------------------------------


@cache
def picture() -> ET.Element:
    return ET.parse(PICTURE).getroot()


def lines() -> list[tuple[str, set[str], float, float]]:
    """Each text of the picture: what it says, its classes, and where it stands."""
    found = picture().findall(f"{SVG}text")
    return [
        (str(t.text), {*t.get("class", "").split()}, float(t.attrib["x"]), float(t.attrib["y"]))
        for t in found
    ]


def sizes() -> dict[str, float]:
    """The size of the letters of each class, in px; "" is that of the picture."""
    style = str(picture().findtext(f"{SVG}style"))
    of_classes = re.findall(r"\.(\w+) \{[^}]*font-size: (\d+)px", style)
    return {"": float(picture().attrib["font-size"])} | {n: float(px) for n, px in of_classes}


def test_no_text_of_the_picture_runs_over_its_box() -> None:
    boxes = [
        tuple(float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        for box in picture().findall(f"{SVG}rect")
    ]
    over = []
    for text, classes, x, y in lines():
        size = next((px for name, px in sizes().items() if name in classes), sizes()[""])
        # As wide as letters of a wide font are; the bold ones are wider.
        width = len(text) * size * (0.6 if classes & {"name", "head", "file"} else 0.55)
        left = x - width * ("end" in classes) - width / 2 * ("mid" in classes)
        around = [b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3]]
        box = min(around, key=lambda b: b[2] * b[3])
        if left < box[0] + 1 or left + width > box[0] + box[2] - 1:
            over.append(text)
    assert over == []


def test_the_letters_of_the_picture_can_be_read_where_github_shows_it() -> None:
    width = float(picture().attrib["viewBox"].split()[2])
    assert min(sizes().values()) * 830 / width >= 11  # px, in a column of 830 px


def test_the_layers_of_the_picture_are_the_floors_with_files_that_there_are() -> None:
    said = [(text, classes) for text, classes, *_ in lines()]
    folders = [text.rstrip("/") for text, _ in said if re.fullmatch(r"\w+/", text)]
    in_house = [name for name in FLOORS if name not in ("root", "leaves", "doctor")]
    assert [name for name in folders if name != "doctor"] == in_house
    for folder in in_house:
        place = [text for text, _ in said].index(f"{folder}/")
        names = next(text for text, classes in said[place:] if "small" in classes).split(", ")
        for name in names:
            path = PACKAGE / folder / name.rstrip("/")
            assert path.is_dir() or path.with_suffix(".py").exists(), (folder, name)
    looked_at = stems(PACKAGE / "doctor") - {"doctor", "doctor_file"}
    assert looked_at <= {text for text, _ in said}
