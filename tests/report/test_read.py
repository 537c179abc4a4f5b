"""Reading a run folder: what a run stores is what the page shows, and a run in any state still gives a page."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from world import ALONE

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.data.writer import Writer
from prefgrpo.report.read import read_run
from prefgrpo.rollout.render import sample
from prefgrpo.run.evaluation import EvalSet, Evaluator
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.groups import save_groups
from scripts.demo_world.strip import GAP, MARGIN, write_strip
from tests.report.synthetic import STEPS, charts, last, make_run, report, small_run, train_row


@pytest.mark.parametrize("counts", [(1, 2, 1), (0, 2, 1), (2, 0, 0), (2, 2, 2), (0, 0, 0)])
def test_prompts_with_different_numbers_of_sources_are_stored_and_read(counts, tmp_path, monkeypatch):
    """A file may have such edits: what an evaluation and a training step store of them is what is shown."""
    monkeypatch.setattr(Evaluator, "render", lambda self, index: [np.zeros((8, 16, 3), np.uint8)] * len(index))
    prompts = []
    for k, count in enumerate(counts):
        files = [tmp_path / f"{k}_{n}.png" for n in range(count)]
        for n, file in enumerate(files):
            Image.new("RGB", (16, 8), (80 * k, 100 * n, 50)).save(file)
        prompts.append(Prompt(k, f"edit {k}", source=tuple(map(str, files))))
    folder = RunFolder(tmp_path / "run")
    for place in (folder.eval, folder.groups):
        place.mkdir(parents=True)
    sizes = SamplingConfig(height=8, width=16)
    writer = Writer()
    stills = SimpleNamespace(frame_rate=None)
    parts = (stills, None, None, None, ALONE, folder, writer)
    evaluator = Evaluator(EvalSet("dev", prompts, [0, 1, 2], 0), sizes, *parts)
    evaluator.start(resumed=False)
    evaluator._save_report_images(2, [0, 1, 2], evaluator.before)
    groups = {k: dict.fromkeys(range(2), sample(p, Media(evaluator.before[0]), sizes)) for k, p in enumerate(prompts)}
    tables = {"comparisons": {"j": np.zeros((3, 2, 2, 2))}, "values": {"j": np.zeros((3, 2))}}
    save_groups(folder.group(2), SimpleNamespace(samples=groups, **tables), writer)
    writer.close()
    small_run(folder.root, [{"kind": "eval", "step": 2, "set": "dev", "dev/win_judge": 0.5}])
    run = read_run(folder.root)
    assert not run.problems
    for kept in (run.stored["dev"].pairs, run.groups):
        assert [one.prompt for one in kept] == ["edit 0", "edit 1", "edit 2"]
        for k, (one, count) in enumerate(zip(kept, counts, strict=True)):
            if not count:
                assert one.source is None
                continue
            columns = [[80 * k, 100 * n, 50] for n in range(count)]
            np.testing.assert_array_equal(one.source, np.repeat([np.repeat(columns, 16, axis=0)], 8, axis=0))


def test_a_torn_last_line_and_an_unfinished_run(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20, planned=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 41, "grad_no')
    page = report(folder)
    assert "40 of 100 steps so far" in page.all("p", "status")[0].text
    assert page.all("h1")[0].text == "demo" and "(dev)" in page.all("p", "result")[0].text
    assert last(charts(page)["Time per step"], "update") == f"{train_row(40, 100)['time/update']:.3g} s"


def wrong_arrays():
    file = io.BytesIO()
    np.savez(file, images=np.zeros((1, 2, 4, 4, 3), np.uint8))
    return file.getvalue()


DAMAGED = "could not be read"
DAMAGE = {
    "metrics.jsonl": (lambda data: data.replace(b'{"kind": "train", "step": 2', b'{"kind": "tr', 1), "[4]"),
    "config.yaml": (lambda data: b"train: {steps: [\n", "could not be read"),
    "eval/dev_000040.npz": (lambda data: b"", DAMAGED),
    "groups/step_000020.npz": (lambda data: data[:300] + bytes(300) + data[600:], DAMAGED),
    "groups/step_000040.npz": (lambda data: wrong_arrays(), DAMAGED),
    "eval/test_000040.json": (lambda data: b"[1]", DAMAGED),
    "eval/test_prompts.json": (lambda data: b"\xff", "could not be read"),
}


def test_damaged_files_are_left_out_and_named_in_plain_words(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20)
    for name, (damage, _) in DAMAGE.items():
        file = folder / name
        file.write_bytes(damage(file.read_bytes()))
    page = report(folder)
    (problem,) = page.all("p", "problems")
    for name, (_, said) in DAMAGE.items():
        assert name.rpartition("/")[2] in problem.text and said in problem.text
    assert len(page.all("figure", "pair")) == 12 and not page.all("figure", "group")
    assert "(test)" in page.all("p", "result")[0].text and "Time per step" in charts(page)


def test_the_strip_of_the_readme_shows_the_last_evaluation(run, tmp_path):
    """The first image before training, enlarged four times, and the same after it below."""
    with Image.open(write_strip(run, tmp_path / "strip.png", columns=2)) as opened:
        strip = np.asarray(opened.convert("RGB"))
    with np.load(run / "eval" / f"test_{STEPS:06d}.npz") as stored:
        wanted = [stored[name][0].repeat(4, 0).repeat(4, 1) for name in ("before", "now")]
    for top, image in zip((MARGIN, MARGIN + 128 + GAP), wanted, strict=True):
        assert any(np.array_equal(strip[top : top + 128, x : x + 128], image) for x in range(strip.shape[1] - 128))
