"""The report in a real browser, used as a reader would, on a desktop, on a phone and in dark mode.

These tests cover what only a browser can show: what a click, a key or a URL opens, which images a filter leaves,
whether anything is wider than a phone's screen, and whether text is legible. Expected values are those that the test
wrote to the run folder; pixels are read back from a canvas. Needs playwright and an installed Chromium.
"""

import json
import shutil

import numpy as np
import pytest
import yaml
from report_run import evaluated, make_run, outcomes

from prefgrpo.report import write_comparison, write_report

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

CONTRAST = """() => {
  const rgb = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { c: [r, g, b], a }; };
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = node => { for (let n = node; n; n = n.parentElement) {
    const { c, a } = rgb(getComputedStyle(n).backgroundColor); if (a === 1) return c; } return [255, 255, 255]; };
  const bad = [];
  document.querySelectorAll("details").forEach(d => d.open = true);
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest(".group svg")) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const a = light(rgb(svg ? style.fill : style.color).c), b = light(ground(node));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push([node.tagName, node.className.baseVal ?? node.className, node.textContent.trim(), ratio]);
  }
  return bad;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: two seeds, and one with another learning rate; the first has every file that a run can have."""
    folder, made = tmp_path_factory.mktemp("runs"), []
    for k in range(3):
        run = make_run(folder / f"run{k}", steps=40, every=20)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config |= {"seed": k, "name": f"run{k}", "train": config["train"] | {"lr": 1e-4 if k < 2 else 5e-4}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        outcomes(run, "test", 40)
        if k == 0:
            evaluated(run)
        write_report(run)
        made.append(run)
    return made


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """visit(file, phone=, dark=) → the page, offline; fails on any script error, console line or network request."""
    contexts, wrong = [], []

    def go(file, phone=False, dark=False, at=""):
        look = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True} if phone else {}
        context = chromium.new_context(color_scheme="dark" if dark else "light", **look)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text))
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url[:5] not in ("file:", "data:") else None)
        page.goto(f"file://{file}{at}")
        return page

    yield go
    for context in contexts:
        context.close()
    assert not wrong


def shown(page):
    """1-based numbers of the pairs that pass the filter, in page order."""
    ids = page.locator(".pair:visible").evaluate_all("all => all.map(f => f.dataset.id)")
    return [int(ident.rpartition("-")[2]) for ident in ids]


def pixels(page, selector):
    """RGB of an <img> as the browser decodes it."""
    flat, width, height = page.locator(selector).evaluate(
        """async i => { await i.decode(); const w = i.naturalWidth, h = i.naturalHeight;
        const c = document.createElement("canvas"); c.width = w; c.height = h;
        const x = c.getContext("2d"); x.drawImage(i, 0, 0);
        return [[...x.getImageData(0, 0, w, h).data], w, h]; }"""
    )
    return np.array(flat, np.uint8).reshape(height, width, 4)[..., :3]


def table(page, rows=".said tbody tr"):
    """The texts of a table's cells, by row; of the viewer's: shown first, prefers, answer."""
    return page.locator(rows).evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent))")


def test_the_navigation_leads_to_every_section(runs, visit):
    page = visit(runs[0] / "report.html")
    sections = ["Result", "Evaluations", "Images", "Verdicts", "Curves", "Config"]
    assert page.locator("nav a").all_text_contents() == sections
    for name in ("Curves", "Images", "Evaluations", "Verdicts", "Config", "Result"):
        page.click(f"nav a:text('{name}')")
        page.wait_for_function("n => document.querySelector('nav [aria-current]')?.textContent === n", arg=name)
        assert page.locator(f"#{name.lower()} :is(h1, h2)").first.is_visible()


def test_the_filter_shows_who_won_and_what_changed_most(runs, visit):
    page, kept = visit(runs[0] / "report.html"), json.loads((runs[0] / "eval" / "test_000040.json").read_text())
    kept = [row for row in kept if "answers" in row]
    with np.load(runs[0] / "eval" / "test_000040.npz") as file:
        change = np.abs(file["now"].astype(float) - file["before"]).mean((1, 2, 3))
    assert shown(page) == list(range(1, len(kept) + 1))
    for judge in ("judge", "scenes"):
        page.select_option(".filter select", judge)
        for button, win in (("won", 1.0), ("lost", 0.0), ("tied", 0.5)):
            wanted = [k for k, row in enumerate(kept, 1) if row["wins"][judge] == win]
            page.click(f".filter [data-show={button}]")
            assert shown(page) == wanted and page.text_content(f"[data-show={button}]") == f"{button} {len(wanted)}"
    page.click("[data-show=changed]")
    assert [change[k - 1] for k in shown(page)] == pytest.approx(sorted(change, reverse=True), abs=1e-2)
    page.click("[data-show=all]")
    assert shown(page) == list(range(1, len(kept) + 1))


def test_an_image_enlarges_wipes_and_has_a_link(runs, visit):
    page = visit(runs[0] / "report.html")
    prompts = json.loads((runs[0] / "eval" / "test_prompts.json").read_text())
    page.click(".pair:nth-of-type(3) a")
    assert page.text_content("#viewer-prompt") == prompts[2] and page.url.endswith("#test-40-3")
    with np.load(runs[0] / "eval" / "test_000040.npz") as file:
        for name, key in (("first", "before"), ("second", "now")):
            np.testing.assert_array_equal(pixels(page, f"dialog .{name} img"), file[key][2])
    boxes = [page.locator(f"dialog .{name} img").bounding_box() for name in ("first", "second")]
    assert min(box["width"] for box in boxes) > 300 and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert table(page) == [  # the third image kept is the set's fifth, which won in both orders
        ["after 40 steps", "after 40 steps (0.900)", "answer 4 after"],
        ["before", "after 40 steps (0.800)", "answer 4 before"],
    ]
    page.keyboard.press("w")
    page.locator(".wipe input").evaluate("i => { i.value = 25; i.dispatchEvent(new Event('input')); }")
    boxes = [page.locator(f"dialog .{name} img").bounding_box() for name in ("first", "second")]
    assert boxes[0] == boxes[1]
    assert page.locator("dialog .second").evaluate("f => getComputedStyle(f).clipPath") == "inset(0px 0px 0px 25%)"
    page.mouse.move(boxes[0]["x"] + boxes[0]["width"] * 0.6, boxes[0]["y"] + 50)
    assert float(page.input_value(".wipe input")) == pytest.approx(60, abs=2)
    page.keyboard.press("ArrowRight")
    assert page.text_content("#viewer-prompt") == prompts[3] and page.url.endswith("#test-40-4")
    link = page.locator("#viewer-link").evaluate("a => a.href")
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    again = visit(runs[0] / "report.html", at="#" + link.rpartition("#")[2])
    assert again.text_content("#viewer-prompt") == prompts[3] and again.locator("dialog").is_visible()
    again.keyboard.press("ArrowLeft")
    assert again.text_content("#viewer-prompt") == prompts[2]


def test_verdicts_are_browsed_by_what_is_odd_about_them(runs, visit):
    page, kept = visit(runs[0] / "report.html"), json.loads((runs[0] / "eval" / "test_000040.json").read_text())
    kept = [row for row in kept if "answers" in row]
    differ = [row["wins"] for row in kept if {*row["wins"].values()} == {0.0, 1.0}]
    page.click("[data-browse=differs]")
    assert page.text_content("#viewer-place") == f"1 of {len(differ)}"
    assert "wins · scenes" in page.text_content(".said .wins")
    page.keyboard.press("Escape")
    page.click("[data-browse='']")
    first = page.text_content("#viewer-place")
    page.keyboard.press("ArrowLeft")
    assert first.startswith("1 of ") and page.text_content("#viewer-place") == f"{first[5:]} of {first[5:]}"
    page.keyboard.press("Escape")
    # in the first group, the matrix cell for best image against worst links to the two logged answers on this pair
    page.locator(".group").first.locator("svg a").nth(6).click()
    i, j = (int(k) for k in page.url.rsplit("-", 2)[1:])
    p = (1 + i) / (2 + i + j)
    wanted = sorted(
        [f"image {a + 1}", f"image {(i if x > 0.5 else j) + 1} ({max(x, 1 - x):.3f})", f"<A> 0 {a} {b}"]
        for a, b, x in ((i, j, p), (j, i, p))
    )
    assert sorted(table(page)) == wanted


def test_verdicts_without_an_answer_say_why(runs, visit):
    page = visit(runs[0] / "report.html")
    item = json.loads(page.text_content("#items"))[0]
    page.evaluate("i => { byId.set('odd', i); items.push(i); location.hash = 'odd'; }", item | {
        "id": "odd", "orders": [["j", 1, None, "timed out", ""], ["j", 0, 0.5, "", "<b>tie</b>"]], "wins": {},
    })  # fmt: skip
    page.wait_for_function("document.getElementById('viewer').open")
    assert table(page) == [["after 40 steps", "no verdict", "timed out"], ["before", "neither (0.500)", "<b>tie</b>"]]


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_and_fits_a_phone(runs, visit, dark):
    compared = write_comparison(runs, runs[0].parent / "all.html")
    for file in (runs[0] / "report.html", compared):
        page = visit(file, phone=True, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(CONTRAST) == []
        page.locator(".pair a").first.tap()
        assert page.evaluate("document.getElementById('viewer').scrollWidth") <= 390
        page.tap("[data-do=wipe]")
        assert page.locator("dialog .first img").bounding_box()["width"] > 340
        assert page.evaluate(CONTRAST) == []


def test_runs_are_compared_with_bands_over_seeds(runs, visit):
    compared = write_comparison(runs, runs[0].parent / "all.html")
    page = visit(compared)
    heads = page.locator(".compared thead th").all_text_contents()[1:]
    assert heads == ["run0 … run1 (2 seeds)", "run2"]
    cells = {name: others for name, *others in table(page, ".compared tr")}
    assert cells["against its initial model"] == ["inconclusive"] * 2 and page.text_content(".subject") == "tiny/flux"
    assert cells["differs in"] == ["train.lr 0.0001", "train.lr 0.0005"]
    assert cells["win rate by judge"] == ["91 % ± 0.0".replace(" %", "\u00a0%"), "91\u00a0% [85–97]"]
    wins = page.locator("figure.chart", has_text="Win rate against the initial model: by judge").first
    assert wins.locator("path.band").count() == 1 and wins.locator("path.line").count() == 2
    with np.load(runs[2] / "eval" / "test_000040.npz") as file:
        page.click(".pair >> nth=1 >> a")
        assert page.locator("dialog figcaption").all_text_contents() == ["before", "run0", "run1", "run2"]
        np.testing.assert_array_equal(pixels(page, "dialog .second img"), file["now"][1])
    page.keyboard.press("Escape")
    page.click("a:text('run1')")
    assert page.text_content("h1") == "run1"
