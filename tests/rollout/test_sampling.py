"""A step rule of one's own, named by its path.

Why these cases: the example of the docs has to train as a shipped rule does: first ratio exactly 1, and a resumed run
with the bytes of an uninterrupted one. What a user's function does wrong has to be said before the model is loaded.
"""

import re

import pytest
import torch
from world import rows

from prefgrpo.config.recipe import ConfigError


@pytest.fixture(scope="module")
def constant(place, root):
    """The example of docs/extend.md as a file: the path that names its rule."""
    page = (root / "docs" / "extend.md").read_text(encoding="utf-8")
    file = place / "constant.py"
    file.write_text(re.search(r'```python title="constant.py"\n(.*?)```', page, re.S)[1], encoding="utf-8")
    return f"{file}:constant"


@pytest.mark.full
def test_a_rule_by_path_trains_and_resumes(trainer, constant):
    over = {"rollout": {"rule": constant}, "eval": {"every": 0}}
    whole = trainer("whole", train={"steps": 2}, **over)
    given = whole.groups.schedules.step(0)
    shipped = trainer("shipped", eval={"every": 0}).groups.schedules.step(0)
    assert given.sde_steps == shipped.sde_steps and not torch.equal(given.coef, shipped.coef)
    whole.train()
    found = rows(whole.folder.root)
    assert [row["policy/on_policy_error"] for row in found] == [0.0, 0.0] and found[0]["grad_norm"] > 0
    trainer("halves", train={"steps": 1}, **over).train()
    resumed = trainer("halves", resume=True, train={"steps": 2}, **over)
    resumed.train()
    saved = [run.folder.checkpoint(2) / "__0_0.distcp" for run in (whole, resumed)]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    assert rows(resumed.folder.root) == found


MISTAKES = {
    "ode": "rollout.rule: expected one of flow, dance, .*, or file.py:function, got 'ode'",
    "nowhere.py:rule": "rollout.rule: cannot load 'nowhere.py:rule': FileNotFoundError",
    "{file}:missing": "rollout.rule: cannot load .*no attribute 'missing'",
    "{file}:NUMBER": "rollout.rule: expected a function at .*, got int",
    "{file}:short": "rollout.rule: .*:short raised TypeError: .*, for StepInfo",
    "{file}:infinite": "rollout.rule: expected finite numbers of .*:infinite, got Row",
    "{file}:still": "rollout.window_low/high: .* they are deterministic under rule .*:still",
}
OWN = """
from prefgrpo.sde.rules import ode

NUMBER = 1
short = lambda info: (1.0, 2.0)
infinite = lambda info: (1.0, float("inf"), 0.1, -1.0, 0.0)
still = lambda info: ode(info)
"""


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_rule_says_what_was_expected(trainer, place, name):
    (place / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=MISTAKES[name]):
        trainer(rollout={"rule": name.format(file=place / "own.py")}, eval={"every": 0})
