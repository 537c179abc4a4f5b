"""The benchmarks run and check results before timing them; the pages match the committed results.

A short real run of the small ops and of the cases on tiny latents; no timing is asserted.
"""

import dataclasses
import json

import pytest
import torch

import benchmarks.__main__ as ops
from benchmarks import bench_judge, bench_train, blocks, calls, harness, science, test_advantage, test_sde_step
from prefgrpo.judge.verdict import Verdict
from prefgrpo.tiny import pipelines


def test_every_kind_of_case_compares_and_times(monkeypatch):
    monkeypatch.setattr(test_sde_step, "SHAPES", dict.fromkeys(test_sde_step.SHAPES, (8, 16)))
    monkeypatch.setitem(harness.CACHE, "cpu", 2 << 20)
    cases = [*list(test_sde_step.cases("cpu"))[4:8], *test_advantage.cases("cpu")]
    for case in cases:
        quick = {name: f for name, f in case.variants.items() if name != "compile"}
        seen = harness.measure(dataclasses.replace(case, variants=quick), "cpu", 2)
        assert set(seen["us"]) == {*quick, *(("copy",) if case.bytes else ())}
        assert min(min(quartiles) for quartiles in seen["us"].values()) > 0
        assert ops.line(seen).startswith(f"| {case.op} | {case.shape}")


def test_a_wrong_result_is_not_timed():
    (case,) = test_advantage.cases("cpu")
    wrong = dataclasses.replace(case, variants={**case.variants, "compile": lambda i: 2 * test_advantage.eager(i)})
    with pytest.raises(RuntimeError, match="compile: differs from ours"):
        harness.measure(wrong, "cpu", 2)


def test_the_page_is_rendered_from_the_results():
    assert json.loads((ops.RESULTS / "cpu.json").read_text())["results"]
    assert ops.PAGE.read_text() == ops.page()


def test_a_lost_answer_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_judge.HttpJudge, "judge_group", lambda *_: [Verdict(None, "lost")])
    with bench_judge.echo_server() as url, pytest.raises(RuntimeError, match="0 of 3 pairs were answered"):
        bench_judge.measure(url, "echo", rounds=2, size=3, side=16)


def test_blocks_of_other_pages_are_rendered_from_the_results(root):
    client = bench_judge.table(json.loads(bench_judge.RESULTS.read_text()))
    found = [("science", "client", client)]
    found += [("science", f"calls-{world}", calls.block(world)) for world in ("scenes", "words")]
    found += [("science", f"science-{key}", science.block(key)) for key in science.EXPERIMENTS]
    for page, name, block in found:
        text = (root / "docs" / f"{page}.md").read_text()
        assert blocks.rendered(text, name, block) == text, f"docs/{page}.md differs from benchmarks/results"


def test_the_benchmarked_flux_has_the_published_size():
    """The transformer and the VAE have FLUX.1-dev's numbers of parameters; its text encoders, two layers."""
    pipe = bench_train.flux(bench_train.PUBLISHED, "meta", torch.bfloat16)
    sizes = {name: sum(p.numel() for p in getattr(pipe, name).parameters()) for name in ("transformer", "vae")}
    assert sizes == {"transformer": 11_901_408_320, "vae": 83_819_683}
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    assert pipe.text_encoder_2.config.d_model == 4096
    wide = bench_train.flux(bench_train.WIDE, "cpu", torch.float32)
    assert wide.transformer.config.in_channels == 4 * wide.vae.config.latent_channels == 64


@pytest.mark.full
def test_a_training_step_is_timed(tmp_path):
    """The shipped recipe on a tiny pipeline, in processes of its own, as `python -m benchmarks.bench_train` runs it."""
    model, out = pipelines.make("flux", tmp_path / "model"), tmp_path / "train.json"
    small = ["--sides", "32", "--steps", "2", "--matmul", "64"]
    bench_train.main(["--device", "cpu", "--model", str(model), *small, "--out", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["seconds"].keys() >= {"rollout", "update"} and run["step_over_model"] >= 1
    assert run["flop_per_sample"]["train"] > 2 * run["flop_per_sample"]["forward"] > 0
