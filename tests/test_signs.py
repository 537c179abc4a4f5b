"""Signs of reward hacking, on rows as runs write them.

Why these cases: an alarm that never fires is useless, and one that fires in healthy runs gets switched off. The
histories are of endpoint runs in the demo world (healthy: GRPO with its recipe; declining: AWM without a trust region).
"""

import numpy as np
import pytest
from tiny_run import rows

from prefgrpo.run.signs import SIGNS, WINDOW, HackingMonitor, pixel_distance


def test_the_distance_is_that_of_all_pairs():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)
    pairs = [((a / 255 - b / 255) ** 2).mean() for i, a in enumerate(images) for b in images[:i]]
    assert pixel_distance(images) == pytest.approx(np.mean(pairs) ** 0.5, rel=1e-5)
    assert pixel_distance(images[:1].repeat(3, 0)) == 0.0


def history(diversity, inconsistency, steps=60):
    """Training rows whose values change linearly from the first to the last."""
    for k in range(steps):
        at = k / (steps - 1)
        values = {"diversity/pixels": diversity, "judge/order_inconsistency": inconsistency}
        yield {"kind": "train", "step": k + 1} | {n: a + (b - a) * at for n, (a, b) in values.items()}


@pytest.mark.parametrize(
    ("diversity", "inconsistency", "expected"),
    [
        ((0.172, 0.107), (0.03, 0.11), set()),
        ((0.172, 0.047), (0.03, 0.19), {"diversity", "order_inconsistency"}),
        ((0.172, 0.172), (0.02, 0.19), {"order_inconsistency"}),
        ((0.172, 0.172), (0.20, 0.25), set()),
    ],
)
def test_signs_of_steps(diversity, inconsistency, expected):
    signs, seen = HackingMonitor([]), []
    for row in history(diversity, inconsistency):
        seen += signs.add("train", row)
    assert sorted(seen) == sorted(expected), "each sign must be reported once"
    known = list(history(diversity, inconsistency))
    again = HackingMonitor([], known[:-1])
    assert set(again.add("train", known[-1])) == set(), "a resumed run must not repeat signs"
    assert not HackingMonitor([], known[: 2 * WINDOW - 2]).add("train", known[-1])


def test_a_monitor_that_falls_while_the_judge_rises():
    def row(step, win, scenes, **more):
        return {"kind": "eval", "set": "dev", "step": step, "dev/win_judge": win, "dev/scenes": scenes} | more

    signs = HackingMonitor(["clip"])
    assert not signs.add("eval", row(0, None, 0.39))
    assert not signs.add("eval", row(25, 0.70, 0.82)) and not signs.add("eval", row(50, 0.75, 0.78))
    (text,) = signs.add("eval", row(75, 0.80, 0.733, **{"dev/scenes_before": 0.39})).values()
    assert text == "dev/scenes fell from 0.820 to 0.733, while dev/win_judge rose"
    assert not HackingMonitor(["clip"], [row(25, 0.7, 0.82)]).add("eval", row(50, 0.6, 0.7)), (
        "if all fall, it is no hacking"
    )
    trained = [row(25, None, 0.8, **{"dev/clip": 0.3}), row(50, None, 0.7, **{"dev/clip": 0.35})]
    assert set(HackingMonitor(["clip"], trained[:1]).add("eval", trained[1])) == {"monitors"}
    for r, wins in zip(trained, (0.5, 0.6), strict=True):
        r |= {"dev/clip": 0.3 - wins, "dev/win_aesthetic": wins}
    assert not HackingMonitor(["clip"], trained[:1]).add("eval", trained[1]), "no trained reward rose"


def test_a_run_ends_at_a_sign(trainer, monkeypatch, capsys):
    falling = iter(range(999, 0, -1))
    monkeypatch.setattr("prefgrpo.run.trainer.pixel_distance", lambda images: next(falling))
    monkeypatch.setattr("prefgrpo.run.signs.WINDOW", 1)
    monkeypatch.setattr("prefgrpo.run.signs.LESS_DIVERSE", 0.9965)
    loop = trainer(train={"steps": 6, "stop_when": ["diversity"]}, eval={"every": 0})
    loop.run()
    written, said = rows(loop.folder.root), capsys.readouterr().out
    assert [r["step"] for r in written] == [1, 2, 3] and SIGNS[0] in said
    assert written[0]["diversity/pixels"] == 998.5
    assert "a sign of reward hacking (diversity)" in said and "training stops (train.stop_when): diversity" in said
    assert (loop.folder.checkpoint(3) / "state.json").is_file()
