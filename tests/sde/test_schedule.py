"""The schedule of a trajectory: coefficient table, stochastic windows, static shift.

Why these cases: the table must equal the rules at the fp32 σ that the model is given; a window must be the same on
every rank, move over steps, stay in range and cover it evenly; a step without noise must never be trained.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.sde.rules import RULES, StepInfo
from prefgrpo.sde.schedule import consecutive, make_schedule, shifted_sigmas, step_weights, subset


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


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.data())
def test_a_window_is_consecutive_in_range_and_a_function_of_its_draw(steps, data):
    low = data.draw(st.integers(0, steps - 1))
    high = data.draw(st.integers(low + 1, steps))
    size = data.draw(st.integers(0, high - low))
    draw, steps = data.draw(st.integers(0, 2**63 - 1)), range(low, high)
    window = consecutive(steps, size, draw)
    assert window == consecutive(steps, size, draw)
    assert window == tuple(range(window[0], window[0] + (size or high - low)))
    assert low <= window[0] and window[-1] < high
    some = subset(steps, size, draw)
    assert some == subset(steps, size, draw) and len(some) == (size or high - low)
    assert list(some) == sorted(set(some)) and set(some) <= set(steps)


def test_windows_move_and_cover_the_range_evenly():
    starts = Counter(consecutive(range(1, 9), 2, k)[0] for k in range(7000))
    assert sorted(starts) == list(range(1, 8))
    assert all(abs(n - 1000) < 5 * 30 for n in starts.values()), starts
    members = Counter(k for draw in range(4000) for k in subset((1, 3, 4, 8), 2, draw))
    assert sorted(members) == [1, 3, 4, 8] and all(abs(n - 2000) < 5 * 32 for n in members.values()), members
    state = torch.random.get_rng_state()
    consecutive(range(1, 9), 2, 0), subset(range(9), 2, 0)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"


def test_step_weights_even_out_what_noise_does_to_the_velocity():
    """velocity: Flash-GRPO's 1 / (√Δt/σ_t + σ_t√Δt(1 − t)/(2t)) with the flow rule's σ_t, divided by its mean."""
    sigmas = shifted_sigmas(6, 3.0)
    schedule, over = make_schedule(sigmas, "flow", 0.7), (1, 2, 3)
    t, dt = sigmas[:-1].double(), -sigmas.double().diff()
    level = 0.7 * torch.sqrt(t / (1 - torch.where(t == 1, t[1], t)))
    published = 1 / (dt.sqrt() / level + level * dt.sqrt() * (1 - t) / (2 * t))
    expected = {
        "velocity": published / published[list(over)].mean(),
        "noise": level * dt.sqrt() / (level * dt.sqrt())[list(over)].mean(),
        "inverse_step": 1 / dt,
    }
    for kind, wanted in expected.items():
        assert torch.allclose(step_weights(schedule, kind, over).double()[:-1], wanted[:-1], rtol=1e-5), kind
