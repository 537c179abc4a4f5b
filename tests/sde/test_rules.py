"""Step rules against independent references: the published formulas in fp64, and golden numbers.

Why these cases: with one wrong sign or σ, a rule silently trains in the wrong direction. The golden numbers were
computed from the papers' formulas in their original (not affine) form; the properties hold for every rule at every σ.
"""

import math
import re
from pathlib import Path

import numpy as np
import ops_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.sde.rules import RULES, StepInfo, sde_row

X, V, Z = map(np.array, ops_cases.INPUTS)


@ops_cases.golden
def test_golden_numbers(case):
    rule, sigma, sigma_next, eta, top, low, mean, std, after, logp = case
    a, b, s, w, c = RULES[rule](StepInfo(sigma, sigma_next, eta, top, low))
    assert np.allclose(a * X + b * V, mean, atol=5e-9)
    assert s == pytest.approx(std, abs=5e-11)
    x_next = a * X + b * V + s * Z
    assert np.allclose(x_next, after, atol=5e-9)
    assert w * np.mean((x_next - a * X - b * V) ** 2) + c == pytest.approx(logp, abs=5e-10)


def test_the_rule_of_the_docs():
    """The example in docs/extend.md is the flow's reverse SDE, and the page names all lists of rules."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "extend.md").read_text(encoding="utf-8")
    section = page.partition("## A step rule")[2].partition("\n## ")[0]
    code = re.search(r'```python title="constant.py"\n(.*?)```', section, re.S)[1]
    assert len(code.splitlines()) < 20
    space = {}
    exec(code, space)
    i = StepInfo(0.8, 0.55, 0.7, 0.93, 0.01)
    a, b, s, w, c = space["constant"](i)
    assert sde_row(space["constant"], *i) == (a, b, s, w, c)
    mean = X + (V + i.eta**2 / (2 * i.sigma) * (X + (1 - i.sigma) * V)) * (i.sigma_next - i.sigma)
    assert np.allclose(a * X + b * V, mean, rtol=1e-12) and s == pytest.approx(0.7 * 0.5)
    assert (w, c) == pytest.approx((-1 / (2 * s * s), -math.log(s) - 0.5 * math.log(2 * math.pi)))
    lists = [file for file in root.glob("prefgrpo/**/*.py") if '"cps_normalised"' in file.read_text(encoding="utf-8")]
    assert {str(file.relative_to(root)) for file in lists} == set(re.findall(r"prefgrpo/[\w/]+\.py", section))


def published(rule, i):
    """(mean, std) of a step by the published equations."""
    levels = {"flow": (i.eta, i.sigma_max), "wan": (i.sigma_max, i.sigma_min)}.get(rule, (i.eta,))
    given = (torch.tensor(value, dtype=torch.float64) for value in (i.sigma, i.sigma_next, *levels))
    mean, std, _ = getattr(ops_cases, rule)(X, V, *given)
    return mean.numpy(), float(std)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([r for r in RULES if r != "ode"]),
    st.floats(0.02, 1.0),
    st.just(0.0) | st.floats(1e-6, 0.99),
    st.floats(0.01, 1.0),
)
def test_the_affine_form_is_the_papers_form(rule, sigma, share, eta):
    info = StepInfo(sigma, sigma * share, eta, 0.93, 0.01)
    a, b, s, w, c = RULES[rule](info)
    mean, std = published(rule.removesuffix("_normalised"), info)
    assert np.allclose(a * X + b * V, mean, rtol=1e-9, atol=1e-12) and s == pytest.approx(std, rel=1e-9, abs=1e-300)
    if s == 0.0:
        assert w == c == 0.0
    elif rule == "cps":
        assert (w, c) == (-1.0, 0.0)
    else:
        assert w * 0.3**2 + c == pytest.approx(-0.5 * (0.3 / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)), rel=1e-9)
    assert all(math.isfinite(n) for n in (a, b, s, w, c))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["flow", "dance", "cps", "cps_normalised"]), st.floats(0.05, 1.0), st.floats(0.0, 0.95))
def test_without_noise_every_rule_is_the_euler_step(rule, sigma, share):
    info = StepInfo(sigma, sigma * share, 0.0, 0.9, 0.0)
    row, euler = RULES[rule](info), RULES["ode"](info)
    assert np.allclose(row, euler, rtol=1e-12, atol=1e-12) and row[2:] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("sigma", "after"), [(0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.1)])
def test_steps_that_do_not_go_down(sigma, after):
    with pytest.raises(ValueError, match="0 <= sigma_next < sigma <= 1, got sigma="):
        sde_row("flow", sigma, after, 0.5)


def test_noise_levels_out_of_range():
    with pytest.raises(ValueError, match=r"eta must be in \[0, 1\] for rule 'cps', got 1.2"):
        sde_row("cps", 0.9, 0.8, 1.2)
    for eta in (-0.1, math.nan):
        with pytest.raises(ValueError, match="eta must be in"):
            sde_row("flow", 0.9, 0.8, eta)
    sde_row("flow", 0.9, 0.8, 5.0)
