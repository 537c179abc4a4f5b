"""The training benchmark runs, on a tiny pipeline; its FLUX.1-dev has the published size."""

import json

import pytest
import torch

from benchmarks import bench_train
from prefgrpo.tiny.pipelines import make


@pytest.mark.full
def test_a_run_is_timed_weighed_and_counted(tmp_path):
    make("flux", tmp_path / "model")
    out = tmp_path / "out.json"
    flags = ["--sides", "32", "--steps", "2", "--matmul", "128", "--out", str(out)]
    bench_train.main(["--device", "cpu", "--model", str(tmp_path / "model"), *flags])
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert set(run["seconds"]) == {"rollout", "judge_wait", "update"} and run["seconds"]["update"] > 0
    forward, train = run["flop_per_sample"]["forward"], run["flop_per_sample"]["train"]
    assert 2 * forward < train < 3.5 * forward, "LoRA: forward, activation gradients, attention at 2.5 times"
    whole = sum(run["seconds"].values())
    assert run["images_per_s"] == pytest.approx(4 / whole, rel=1e-3)
    done = 4 * (10 * forward + 4 * train)
    assert run["mfu"] == pytest.approx(done / whole / (found["matmul_tflops"] * 1e12), rel=1e-3)
    assert run["peak_gib"] > 0 and 1 < run["step_over_model"] < 3


def test_the_true_size():
    pipe = bench_train.flux_dev("meta")
    assert sum(p.numel() for p in pipe.transformer.parameters()) == 11_901_408_320
    assert sum(p.numel() for p in pipe.vae.parameters()) == 83_819_683
    assert pipe.transformer.config.guidance_embeds and pipe.transformer.dtype == torch.bfloat16
