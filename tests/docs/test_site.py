"""The hooks of the site: links, the other language; and what its search finds. CI builds it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import DOCS, ROOT, slug

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(place: str, url: str, **urls: str) -> Any:
    """A page of the site, and the addresses of it in both languages."""
    alternates = {locale: SimpleNamespace(url=address) for locale, address in urls.items()}
    return SimpleNamespace(url=url, file=SimpleNamespace(src_uri=place, alternates=alternates))


CONFIG = page("config.md", "config/", en="config/", zh="zh/config/")


@pytest.mark.parametrize(
    ("place", "link", "expected"),
    [
        ("x.md", "[one](../expbase/experiment.py)", "[one](source/expbase/experiment.py.md)"),
        ("moving/x.md", "[o](../../expbase/cli.py)", "[o](../source/expbase/cli.py.md)"),
        ("x.md", "[proofs](../tests/proofs)", "proofs (`tests/proofs`)"),
        ("x.md", "[tests/proofs](../tests/proofs)", "`tests/proofs`"),
        ("x.md", "[see](config.md#options)", "[see](config.md#options)"),
        ("x.md", "[config.md](config.md)", "[Config and command line](config.md)"),
        ("x.zh.md", "[config.md](config.zh.md)", "[配置与命令行](config.zh.md)"),
        ("x.md", "[a](https://x.org/a.md)", "[a](https://x.org/a.md)"),
        ("x.md", "[a](../nowhere.py) [b](/config.md)", "[a](../nowhere.py) [b](/config.md)"),
        ("x.md", "```text\n[a](../expbase)\n```", "```text\n[a](../expbase)\n```"),
    ],
)
def test_a_link_leads_to_something_on_the_site(
    hooks: Any, place: str, link: str, expected: str
) -> None:
    assert hooks.on_page_markdown(link, page(place, "x/"), None, None) == expected


def test_every_file_that_a_page_leads_to_has_a_page_on_the_site(hooks: Any) -> None:
    text = "[a](../setup.cfg) [b](config.md) [c](../tests/proofs) [d](https://x.org)"
    assert hooks._outside("docs/x.md", text) == ["setup.cfg"]
    assert hooks._outside("docs/moving/x.md", "[a](../../LICENSE)") == ["LICENSE"]
    assert (ROOT / "LICENSE").is_file()


def test_a_file_in_markdown_is_a_page_whose_links_lead_to_the_site(hooks: Any) -> None:
    made = page("source/CHANGELOG.md.md", "source/CHANGELOG.md/")
    text = "[a](docs/config.md) [b](setup.cfg) [docs/x.md](docs/x.md)"
    expected = "[a](../config.md) [b](setup.cfg.md) [docs/x.md](../x.md)"
    assert hooks.on_page_markdown(text, made, None, None) == expected
    code = page("source/expbase/run.py.md", "source/expbase/run.py/")
    assert hooks.on_page_markdown(text, code, None, None) == text


def test_a_heading_is_that_of_the_chinese_page_where_an_english_file_stands_among_them(
    hooks: Any,
) -> None:
    slugs = {"toc": {"slugify": lambda text, separator: slug(text)}}
    made = page("source/CHANGELOG.md.md", "zh/source/CHANGELOG.md/")
    text = "[a](docs/config.md#options) [b](docs/config.md#no-such) [c](docs/no.md#such)"
    for language, anchor in (("zh", "选项"), ("en", "options")):
        config = SimpleNamespace(theme={"language": language}, mdx_configs=slugs)
        expected = f"[a](../config.md#{anchor}) [b](../config.md#no-such) [c](../no.md#such)"
        assert hooks.on_page_markdown(text, made, config, None) == expected


def test_the_pages_lead_to_the_licence_the_changes_and_a_repository_that_is_known() -> None:
    for name in ("index.md", "index.zh.md"):
        text = (DOCS / name).read_text(encoding="utf-8")
        assert all(f"](../{file})" in text for file in ("LICENSE", "CHANGELOG.md"))
    assert 'repo_url: !ENV [REPOSITORY_URL, ""]' in (ROOT / "mkdocs.yml").read_text()


def test_the_other_language_is_named_once_and_at_a_relative_address(hooks: Any) -> None:
    text = "# Config\n\n[中文](config.zh.md)\n\nA [page](x.md).\n"
    assert hooks.on_page_markdown(text, CONFIG, None, None) == "# Config\n\n\nA [page](x.md).\n"
    alternates = [{"lang": "en", "link": "/"}, {"lang": "zh", "link": "/zh/"}]
    config = SimpleNamespace(extra={"alternate": alternates})
    hooks.on_page_context({}, CONFIG, config, None)
    assert [language["link"] for language in alternates] == ["config/", "zh/config/"]


def test_names_that_are_explained_together_stand_side_by_side(hooks: Any) -> None:
    html = (
        '<b><code><span title="m,">model,</span></code></b>\n (<code><span>optimizer</span></code>)'
    )
    expected = "<b><code>model, optimizer</code></b>"
    assert hooks.on_page_content(html, None, None, None) == expected


def test_an_option_is_not_broken_at_its_hyphens(hooks: Any) -> None:
    html = "<p><code>x --init_partial</code> --x</p><pre><code class='y'>--z</code></pre>"
    expected = html.replace("--init_partial", '<span class="option">--init_partial</span>')
    assert hooks.on_page_content(html, None, None, None) == expected


def test_each_language_has_an_index_of_its_own(hooks: Any, tmp_path: Path) -> None:
    docs = [{"location": "config/"}, {"location": "zh/config/"}, {"location": "zh/"}]
    (tmp_path / "search").mkdir()
    index = tmp_path / hooks.INDEX
    index.write_text(json.dumps({"config": {"lang": ["en", "zh"], "separator": " "}, "docs": docs}))
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    english, chinese = (
        json.loads(file.read_text()) for file in (index, tmp_path / "zh" / hooks.INDEX)
    )
    assert [entry["location"] for entry in english["docs"]] == ["config/"]
    assert [entry["location"] for entry in chinese["docs"]] == ["config/", ""]
    assert chinese["config"] == {"lang": ["zh"], "separator": " "}
    for url, base in (("zh/", "."), ("zh/config/", ".."), ("zh/moving/palm/", "../..")):
        shown = hooks.on_post_page('{"base": "../..", "x": 1}', page("", url), None)
        assert shown == f'{{"base": "{base}", "x": 1}}'
    assert hooks.on_post_page('{"base": ".."}', CONFIG, None) == '{"base": ".."}'


# --- the search ------------------------------------------------------------------------------

# What a reader types, and the page that must be the first hit: in English, in Chinese.
ENGLISH = {
    "log a picture": "looking/",
    "log an image": "looking/",
    "pretrained weights": "weights/",
    "freeze": "recipes/",
    "resume longer": "resume/",
    "export": "export/",
    "pandas": "recipes_around/",
    "folds": "recipes_around/",
    "two loaders": "recipes/",
    "gradient clipping": "recipes/",
    "Slurm": "clusters/",
    "test at the end": "validation/",
}
CHINESE = {
    "记录图片": "looking/",
    "冻结": "recipes/",
    "训练更久": "resume/",
    "导出": "export/",
    "pandas": "recipes_around/",
    "交叉验证": "recipes_around/",
    "两个加载器": "recipes/",
    "梯度裁剪": "recipes/",
    "Slurm": "clusters/",
    "最终测试": "validation/",
}


@pytest.mark.parametrize(("folder", "hits"), [("", ENGLISH), ("zh", CHINESE)], ids=["en", "zh"])
def test_the_search_of_the_site_finds_what_readers_look_for_at_its_first_hit(
    folder: str, hits: dict[str, str]
) -> None:
    """The worker that a browser runs is run by node, on the index of the built site."""
    site, node = os.environ.get("SITE"), shutil.which("node")
    if not site or not node:
        pytest.skip("it needs node, and SITE, the folder of a built site: .ci/run builds one")
    command = [node, str(Path(__file__).with_name("search.js")), str(Path(site, folder)), *hits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {query: pages[0] if (pages := found[query]) else None for query in hits} == hits
