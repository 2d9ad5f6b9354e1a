"""Hooks of mkdocs: what is right on GitHub becomes right on the site, wherever it lies.

A link that leaves docs/ leads to a page with that file, made here: nobody knows the address of
the repository. The line with the link to the other language, and the switch at the top of a page,
lead to the same page there, by a relative address: so the site may lie under any path. Each
language has a search of its own.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
CHINESE = "zh/"
INDEX = "search/search_index.json"
SOURCE = "source"  # the folder of the site with files of the repository
_LINK = re.compile(r"\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^````?\w*\n.*?^````?$)", re.DOTALL | re.MULTILINE)
_OTHER_LANGUAGE = re.compile(r"^\[(中文|English)\]\([^)]*\)$", re.MULTILINE)
_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z]\w*")
_ALONE = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"
_KINDS = {".py": "python", ".yaml": "yaml", ".cfg": "ini", ".md": "markdown"}


@event_priority(-200)  # after the plugin for languages, which knows no files that are made
def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file outside of docs/ that a page leads to."""
    language = config.theme["language"]
    texts = [(f"docs/{f.src_uri}", f.content_string) for f in files if f.src_uri.endswith(".md")]
    wanted = {path for place, text in texts for path in _outside(place, text)}
    for path in sorted(wanted):
        kind = _KINDS.get(Path(path).suffix, "text")
        code = (ROOT / path).read_text(encoding="utf-8").replace("````", "` ` ` `")
        text = f"{_ALONE}# {path}\n\n````{kind}\n{code}````\n"
        page = File.generated(config, f"{SOURCE}/{path}.md", content=text)
        if language != "en":
            page.dest_uri = f"{language}/{page.dest_uri}"
        files.append(page)
    return files


def _outside(place: str, text: str) -> list[str]:
    """The files of the repository outside of docs/ that a page at a place there leads to."""
    paths = [_path(place, link[2]) for link in _LINK.finditer(_FENCE.sub("", text))]
    return [path for path in paths if not path.startswith("docs/") and (ROOT / path).is_file()]


def _path(place: str, target: str) -> str:
    """The path in the repository of what a link at a place leads to; docs/ if it is an address."""
    if "://" in target:
        return "docs/"
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns the links of a page into those of the site."""
    place = page.file.src_uri
    if place.startswith(f"{SOURCE}/"):
        return markdown

    def turned(link: re.Match[str]) -> str:
        path = _path(f"docs/{place}", link[2])
        if path.startswith("docs/"):
            label = link[1]
            if label.endswith(".md") and (ROOT / path).is_file():  # the name of a file: its title
                label = (ROOT / path).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            return f"[{label}]({link[2]}{link[3] or ''})"
        if not (ROOT / path).is_file():
            return f"{link[1]} (`{path}`)" if link[1] != path else f"`{path}`"
        return f"[{link[1]}]({posixpath.relpath(f'{SOURCE}/{path}.md', posixpath.dirname(place))})"

    def other_language(link: re.Match[str]) -> str:
        locale = "zh" if link[1] == "中文" else "en"
        address = get_relative_url(page.file.alternates[locale].url, page.url)
        return f'<a href="{address}" hreflang="{locale}">{link[1]}</a>'

    markdown = _OTHER_LANGUAGE.sub(other_language, markdown, count=1)
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keeps the hyphens of an option beside its name where a line is broken."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Makes the language switch of a page lead to the same page, by a relative address."""
    alternates = getattr(page.file, "alternates", {})  # a page made here has none
    for language in config.extra.get("alternate", []):
        other = alternates.get(language["lang"])
        language["link"] = other.url if other else page.url  # the theme makes it relative
    return context


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Makes the search of a Chinese page read the index of the Chinese pages."""
    if not page.url.startswith(CHINESE):
        return output
    base = posixpath.relpath(CHINESE, page.url)
    return re.sub(r'("base": ?")[^"]*', rf"\g<1>{base}", output, count=1)


@event_priority(-200)  # after the plugin for languages, which writes one index for all
def on_post_build(config: Any) -> None:
    """Divides the index of the search; else an English word finds Chinese pages first."""
    path = Path(config.site_dir) / INDEX
    index = json.loads(path.read_text(encoding="utf-8"))
    of_chinese = [entry for entry in index["docs"] if entry["location"].startswith(CHINESE)]
    of_english = [entry for entry in index["docs"] if entry not in of_chinese]
    for entry in of_chinese:
        entry["location"] = entry["location"].removeprefix(CHINESE)
    for language, folder, docs in (("en", "", of_english), ("zh", CHINESE, of_chinese)):
        file = Path(config.site_dir) / folder / INDEX
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"config": {**index["config"], "lang": [language]}, "docs": docs}
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
