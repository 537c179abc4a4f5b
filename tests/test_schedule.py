"""The schedule of a trajectory: coefficient table, stochastic windows, static shift.

Why these cases: the table must be what the rules say at the fp32 σ that the model sees; a window must be the same on
every rank, move over steps, stay in range and cover it evenly; a step without noise must never be trained.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.sde.rules import RULES, StepInfo
from prefgrpo.sde.schedule import make_schedule, sde_window, shifted_sigmas


def test_shift_three_of_dance():
    assert shifted_sigmas(4, 3.0).tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0])
    assert torch.equal(shifted_sigmas(5, 1.0), torch.linspace(1, 0, 6))


@pytest.mark.parametrize("rule", RULES)
def test_the_table_is_the_rules_at_the_fp32_sigmas(rule):
    sigmas = shifted_sigmas(7, 3.0)
    schedule = make_schedule(sigmas, rule, 0.6, (0, 2, 3))
    assert schedule.sigmas is sigmas or torch.equal(schedule.sigmas, sigmas)
    assert schedule.steps == 7 and schedule.coef.shape == (7, 5) and schedule.coef.dtype == torch.float32
    for k in range(7):
        name = rule if k in (0, 2, 3) else "ode"
        info = StepInfo(float(sigmas[k]), float(sigmas[k + 1]), 0.6, float(sigmas[1]), float(sigmas[-1]))
        assert np.array_equal(schedule.coef[k].numpy(), np.array(RULES[name](info), dtype=np.float32))
    assert schedule.sde_steps == (() if rule == "ode" else (0, 2, 3))


def test_steps_without_noise_are_not_trained():
    sigmas = shifted_sigmas(4, 1.0)
    assert make_schedule(sigmas, "cps", 0.8).sde_steps == (0, 1, 2), "σ' = 0: no noise left to add"
    assert make_schedule(sigmas, "flow", 0.0).sde_steps == ()
    assert make_schedule(sigmas, "flow", 0.7, ()).sde_steps == ()
    assert make_schedule(sigmas, "flow", 0.7, (3, 1, 1)).sde_steps == (1, 3)
    assert torch.isfinite(make_schedule(sigmas, "cps", 0.8).coef).all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((torch.tensor([1.0, 0.5, 0.0]), "flwo", 0.7), "unknown step rule 'flwo': expected one of flow"),
        ((torch.tensor([1.0]), "flow", 0.7), "at least two sigmas, got 1"),
        ((torch.tensor([1.0, 0.5, 0.5]), "flow", 0.7), "0 <= sigma_next < sigma <= 1"),
        ((torch.tensor([1.0, float("nan")]), "flow", 0.7), "0 <= sigma_next < sigma <= 1"),
        ((torch.tensor([1.0, 0.5, 0.0]), "flow", 0.7, (2,)), r"sde_steps must lie in 0 … 1 for 2 steps, got \[2\]"),
        ((torch.tensor([1.0, 0.5, 0.0]), "flow", 0.7, (-1,)), "sde_steps must lie in"),
    ],
)
def test_refusals(arguments, told):
    with pytest.raises(ValueError, match=told):
        make_schedule(*arguments)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.data())
def test_a_window_is_consecutive_in_range_and_a_function_of_its_draw(steps, data):
    low = data.draw(st.integers(0, steps - 1))
    high = data.draw(st.integers(low + 1, steps))
    size = data.draw(st.integers(0, high - low))
    seed, draw = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 10**6))
    window = sde_window(steps, size, low, high, seed, draw)
    assert window == sde_window(steps, size, low, high, seed, draw)
    assert window == tuple(range(window[0], window[0] + (size or high - low)))
    assert low <= window[0] and window[-1] < high


def test_windows_move_and_cover_the_range_evenly():
    starts = Counter(sde_window(10, 2, 1, 9, 0, k)[0] for k in range(7000))
    assert sorted(starts) == list(range(1, 8))
    assert all(abs(n - 1000) < 5 * 30 for n in starts.values()), starts
    state = torch.random.get_rng_state()
    sde_window(10, 2, 1, 9, 0, 0)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left alone"


def test_windows_that_do_not_fit():
    with pytest.raises(ValueError, match="a window of 3 steps does not fit into steps 0 … 1"):
        sde_window(4, 3, 0, 2, 0, 0)
    for low, high in ((2, 2), (-1, 2), (0, 5)):
        with pytest.raises(ValueError, match="0 <= low < high <= steps"):
            sde_window(4, 0, low, high, 0, 0)
