"""What is refused because it cannot fit on a GPU, before anything is loaded.

Why these cases: a run that could start must never be refused, so the bytes are compared with those of a loaded model;
and the switches that a message names must be enough, and none of them superfluous.
"""

import pytest
from tiny_run import ALONE, settings, world

from prefgrpo.config.loading import from_dict
from prefgrpo.objectives import objective
from prefgrpo.run.fits import certain_bytes, refusal, remedies, shapes_of
from prefgrpo.run.loading import open_model
from prefgrpo.run.notes import static_bytes

PARTS = ("transformer", "text_encoder", "text_encoder_2", "vae")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("fits"))


def config(place, **over):
    return from_dict(settings(place, "fits", **over))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("encoders", [True, False])
def test_the_bytes_are_those_of_the_loaded_model(place, rank, encoders):
    c = config(place, train={"lora_rank": rank})
    adapter, policy = open_model(c, objective(c.train), ALONE, encoders)
    real = sum(static_bytes(adapter, policy).values())
    told = certain_bytes(c, {name: shapes_of(place / "flux" / name) for name in PARTS}, encoders)
    assert 0.99 * real <= told <= real  # buffers are not in the headers


def test_the_smallest_set_of_switches_that_fits_is_named(place):
    c = config(place, train={"lora_rank": 0})
    shapes = {name: shapes_of(place / "flux" / name) for name in PARTS}
    whole = certain_bytes(c, shapes, True)
    assert refusal(c, place / "flux", True, whole + 1, 4) == ""
    one = refusal(c, place / "flux", True, whole, 4)
    assert "it fits with data.cache, after `prefgrpo preprocess`:" in one
    cached = certain_bytes(c, shapes, False)
    for memory, processes in ((cached, 1), (cached // 2, 8), (cached // 6, 8)):
        told = refusal(c, place / "flux", True, memory, processes)
        named = told.partition("it fits with ")[2].rpartition(":")[0].split(" and ")
        fitting = {
            n for n, changed, loads in remedies(c, True, processes) if certain_bytes(changed, shapes, loads) < memory
        }
        assert named[0] in fitting if len(named) == 1 else not fitting, told


def test_what_no_switch_makes_fit_is_impossible(place):
    assert "impossible on 2 such GPU(s)" in refusal(config(place), place / "flux", True, 1000, 2)
