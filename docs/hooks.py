"""Hooks of mkdocs: what is right on GitHub becomes right on the site, wherever it lies.

A link that leaves docs/ leads to a page with that file, made here: the address of the repository
may be unknown. Such a page is in English on the Chinese site, too, but its links lead to Chinese
pages. The switch at the top of a page leads to the same page in the other language, by a
relative address: so the site may lie under any path. The line with that link is left out. Each
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

ROOT = Path(__file__).parents[1]
CHINESE = "zh/"
INDEX = "search/search_index.json"
SOURCE = "source"  # the folder of the site with files of the repository
_LINK = re.compile(r"\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
_FENCE = re.compile(r"(^````?\w*\n.*?^````?$)", re.DOTALL | re.MULTILINE)
_OTHER_LANGUAGE = re.compile(r"^\[(中文|English)\]\([^)]*\)\n", re.MULTILINE)
_SEVERAL = re.compile(
    r"<b><code>(?:<[^>]*>)*(\w+,)(?:<[^>]*>)*</code></b>\s*\(<code>(.*?)</code>\)", re.DOTALL
)
_TAG = re.compile(r"<[^>]*>")
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
    read = {path: (ROOT / path).read_text(encoding="utf-8") for path in wanted}
    more = {path for place in wanted if _is_page(place) for path in _outside(place, read[place])}
    read |= {path: (ROOT / path).read_text(encoding="utf-8") for path in more}
    for path in sorted(read):
        kind = _KINDS.get(Path(path).suffix, "text")
        code = read[path].replace("````", "` ` ` `")
        shown = read[path] if path in wanted and _is_page(path) else f"````{kind}\n{code}````\n"
        title = "" if shown == read[path] else f"# {path}\n\n"
        page = File.generated(config, f"{SOURCE}/{path}.md", content=_ALONE + title + shown)
        if language != "en":
            page.dest_uri = f"{language}/{page.dest_uri}"
        files.append(page)
    return files


def _is_page(path: str) -> bool:
    """Whether a file of the repository is shown as a page, and not as code."""
    return path.endswith(".md")


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
    made = place.startswith(f"{SOURCE}/")
    origin = place.removeprefix(f"{SOURCE}/").removesuffix(".md") if made else f"docs/{place}"
    if not _is_page(origin):
        return markdown

    def turned(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        path = _path(origin, link[2])
        is_file = (ROOT / path).is_file()
        label = link[1]
        if not is_file and not path.startswith("docs/"):
            if not (ROOT / path).is_dir():
                return link[0]  # it leads nowhere, and mkdocs says so
            return f"{label} (`{path}`)" if label != path else f"`{path}`"
        if label.endswith(".md") and is_file:  # the name of a file: its title
            label = (ROOT / path).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        there = path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCE}/{path}.md"
        address = posixpath.relpath(there, posixpath.dirname(place))
        anchor = link[3] or ""
        if anchor and made and config.theme["language"] != "en":
            anchor = _translated(path, anchor, config)
        return f"[{label}]({address}{anchor})"

    markdown = _OTHER_LANGUAGE.sub("", markdown, count=1)
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
    return "".join(parts)


def _translated(path: str, anchor: str, config: Any) -> str:
    """The anchor of the same heading in a page's translation."""
    pages = [ROOT / path, (ROOT / path).with_suffix(".zh.md")]
    if not all(page.is_file() for page in pages):
        return anchor
    slug = config.mdx_configs["toc"]["slugify"]
    texts = [_FENCE.sub("", page.read_text(encoding="utf-8")) for page in pages]
    english, translated = ([slug(one, "-") for one in _HEADING.findall(text)] for text in texts)
    of_english = dict(zip(english, translated, strict=True))
    return f"#{of_english.get(anchor[1:], anchor[1:])}"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keeps the hyphens of an option beside its name where a line is broken.

    And puts names that a docstring explains together, `rank, world_size: …`, side by side again:
    mkdocstrings takes the first one for the name and the others for its type.
    """
    html = _SEVERAL.sub(
        lambda m: f"<b><code>{m[1]} {_TAG.sub('', m[2]).strip('()')}</code></b>", html
    )
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
