"""The documentation as a reader sees it: no link is broken, the site builds without warnings, and GitHub and the site
render each page alike.

Why these cases: links break first, and a list that only one renderer accepts without a blank line is a paragraph in the
other. Links are resolved by GitHub's anchor rule, independently of mkdocs, and in the built pages by their files. A
line of prose is one sentence, so that a diff shows the sentence that changed.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.report.synthetic import parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").rglob("*.md")]),
]
GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def tokens(text):
    """Every Markdown token of a page as GitHub parses it."""
    for token in GITHUB.parse(text):
        yield token
        yield from token.children or ()


def anchors(text):
    """GitHub's anchors: headings in lower case, no punctuation, hyphens for spaces, a number appended to repeats."""
    found, seen, blocks = set(), Counter(), GITHUB.parse(text)
    for opening, inline in pairwise(blocks):
        if opening.type == "heading_open":
            words = "".join(part.content for part in inline.children)
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken(page):
    """The broken links of a page to targets within the repository."""
    for token in tokens(page.read_text(encoding="utf-8")):
        link = token.attrGet("href") or token.attrGet("src")
        if not link or re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            yield link


def test_every_link_within_the_repository_resolves():
    assert {str(p.relative_to(ROOT)): list(broken(p)) for p in PAGES if list(broken(p))} == {}


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n[a](page.md#a-b-c) [b](#a-b) [c](other.md) ![d](x.png) `[e](y.md)`\n")
    assert list(broken(page)) == ["#a-b", "other.md", "x.png"]


def test_readme_leads_to_every_page():
    named = {(ROOT / t.attrGet("href")).resolve() for t in tokens(PAGES[0].read_text()) if t.attrGet("href")}
    reached = named | {
        (page.parent / t.attrGet("href").split("#")[0]).resolve()
        for page in named if page.suffix == ".md" and page.exists()
        for t in tokens(page.read_text()) if t.attrGet("href")
    }  # fmt: skip
    assert {p for p in PAGES if p.parent == ROOT / "docs"} - reached == set()


def blocks(html):
    """The headings, lists, tables and code blocks of a page, in order."""
    return [node.tag for node in parse(html).all() if re.fullmatch("h[1-6]|[uo]l|li|t[rdh]|pre|strong|em", node.tag)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_on_the_site_is_what_it_is_on_github(page):
    markdown = pytest.importorskip("markdown")
    text = re.sub(r"^```.*?^```", "```\ncode\n```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    site = markdown.markdown(text, extensions=["attr_list", "def_list", "tables", "fenced_code"])
    assert blocks(site) == blocks(GITHUB.render(text))


def crowded(text):
    """The lines of a page's prose with more than one sentence; a bold lead does not count."""
    for opening, inline in pairwise(GITHUB.parse(text)):
        for line in inline.content.split("\n") if opening.type == "paragraph_open" else ():
            if re.search(r"[a-z0-9)][.?!] [A-Z]", re.sub(r"`[^`]*`", "x", re.sub(r"^\*\*[^*]+\*\*", "", line))):
                yield line


def test_a_line_of_prose_is_one_sentence():
    assert list(crowded("**Here.** It is one, e.g. this.\n- Two are `a.b`. And\n")) == ["Two are `a.b`. And"]
    for page in PAGES:
        assert list(crowded(page.read_text(encoding="utf-8"))) == [], page


# ---- the site -------------------------------------------------------------------------------------------------------


class Links:
    """The links of a built page, the resources it loads, and its anchors."""

    def __init__(self, file):
        nodes = parse(file.read_text(encoding="utf-8")).all()
        given = [(n.tag, n.attributes.get("href"), n.attributes.get("src")) for n in nodes]
        self.leads = [href for tag, href, _ in given if tag == "a" and href]
        self.loads = [link for tag, href, src in given if (link := src or (tag == "link" and href))]
        self.ids = {n.attributes["id"] for n in nodes if "id" in n.attributes}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as by `make docs`."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return {file: Links(file) for file in folder.rglob("*.html") if file.name != "404.html"}


@pytest.mark.full
def test_the_site_builds_strictly_and_every_link_on_it_leads_to_a_file(site):
    wrong = []
    for file, page in site.items():
        assert not [link for link in page.loads if re.match(r"\w+:|//", link) and not link.startswith("data:")], file
        for link in [*page.leads, *page.loads]:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (file.parent / path).resolve() if path else file
            known = site.get(target)
            if not target.is_file() or (anchor and known and anchor not in known.ids | {"__skip", "__drawer"}):
                wrong.append((file.name, link))
    assert not wrong
    root = next(file.parent for file in site if file.name == "tutorial.html")
    expected = {"index", "contributing", "changes", *(p.stem for p in PAGES if p.parent == ROOT / "docs")}
    assert {file.stem for file in site if file.parent == root} == expected


@pytest.mark.full
def test_the_reference_has_every_field_command_op_reward_and_objective(site):
    from prefgrpo import ops
    from prefgrpo.commands.cli import COMMANDS
    from prefgrpo.config.loading import flat_fields
    from prefgrpo.config.schema import Config
    from prefgrpo.objectives import OBJECTIVES
    from prefgrpo.rewards import REWARDS

    found = {file.stem: page.ids for file, page in site.items() if file.parent.name == "reference"}
    assert set(flat_fields(Config())) <= found["configuration"]
    assert {f"prefgrpo-{name.replace(' ', '-')}" for name in COMMANDS} <= found["commands"]
    assert {f"prefgrpo.ops.{name}" for name in ops.__all__} <= found["ops"]
    assert {name.lower() for name in REWARDS} <= found["rewards"] and set(OBJECTIVES) <= found["objectives"]
    assert {"prefgrpo.Trainer", "prefgrpo.PairwiseJudge"} <= found["trainer"]


def test_the_navigation_names_every_page_once():
    class Loader(yaml.SafeLoader):
        """Ignores the Python objects of mkdocs extensions."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)

    def pages(nav):
        for item in nav if isinstance(nav, list) else nav.values():
            yield from [item] if isinstance(item, str) else pages(item)

    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    assert [*chain.from_iterable(nav)] == ["Start", "Use", "Python and ops", "Reference", "Develop"]
    named = Counter(pages(nav))
    assert max(named.values()) == 1 and {p.name for p in (ROOT / "docs").glob("*.md")} <= set(named)
