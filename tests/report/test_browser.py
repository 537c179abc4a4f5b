"""The report in a real browser: nothing overflows, every picture is drawn, text is readable, no script or file is asked
for. On a desktop and on a phone, light and dark.
"""

import html
import json
import re
import shutil
import subprocess

import pytest
from report_run import make_run

from prefgrpo.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; install it with: apt install chromium")

MEASURE = """
const colour = text => text.match(/[0-9.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const weights = [0.2126, 0.7152, 0.0722];
const light = text => colour(text).slice(0, 3).map(linear).reduce((sum, v, k) => sum + v * weights[k], 0);
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    const found = getComputedStyle(e).backgroundColor;
    if (colour(found)[3] !== 0) return found;
  }
};
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const contrasts = [...page.querySelectorAll("h1, h2, h3, p, dt, dd, td, th, summary, small, a, li")]
    .filter(e => e.textContent.trim())
    .map(e => [light(getComputedStyle(e).color), light(ground(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  const images = [...page.images];
  document.body.textContent = JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    images: images.length,
    broken: images.filter(i => !i.complete || !i.naturalWidth || !i.alt).length,
    contrast: Math.min(...contrasts),
    ground: light(getComputedStyle(page.body).backgroundColor),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name)
      .filter(name => !name.startsWith("data:")),
  });
};
frame.srcdoc = source.value;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "demo", steps=40, every=20)
    return write_report(folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_page_is_readable_in_a_browser(page, tmp_path, width, height, dark):
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        f'<meta charset="utf-8"><iframe id="frame" width="{width}" height="{height}"></iframe>'
        f'<textarea id="source">{html.escape(page)}</textarea><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width + 40},{height + 40}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    body = re.search(r"<body>(\{.*\})", shown.stdout, re.DOTALL)
    assert body, f"the browser measured nothing: {shown.stderr[-2000:]}"
    measured = json.loads(html.unescape(body[1].partition("</body>")[0]))
    assert measured["overflow"] <= 0, "the page scrolls sideways"
    assert measured["images"] > 10 and measured["broken"] == 0
    assert measured["contrast"] >= 4.5, "WCAG AA asks for 4.5"
    assert (measured["ground"] < 0.1) == dark
    assert measured["requests"] == []
