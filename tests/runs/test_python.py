"""`prefgrpo.Trainer`: training from Python, with reward functions and judges given as objects.

Why these cases: a run from Python must be bit-identical to the same recipe run from the command line; a wrong argument
must be reported by its recipe field before anything starts; and it must work in a notebook and in a thread.
"""

import asyncio
import logging
import re
import threading
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from ranks import train, trained
from safetensors.torch import load_file
from servers import JudgeServer
from world import BASE, PROMPTS, merged, recipe, rows, weights

from prefgrpo import ConfigError, PairwiseJudge, Trainer
from prefgrpo.config.loading import to_dict
from prefgrpo.config.schema import Config
from prefgrpo.models import MODELS, family_of
from prefgrpo.models import base as models_base
from prefgrpo.models.folder import hub_id, locate
from prefgrpo.rewards.simple import JpegCompressibility
from prefgrpo.run.measures import Subject, read_comparison, rewards_of_step
from prefgrpo.tiny import pipelines

JUDGE = Path(__file__).resolve().parents[2] / "prefgrpo" / "tiny" / "assets" / "judge"


def trainer(place, name, **arguments):
    """A Trainer with the settings of BASE passed as arguments."""
    defaults = {key: value for key, value in to_dict(Config()).items() if key not in ("family", "model", "rewards")}
    base = merged(defaults, {key: value for key, value in BASE.items() if key not in ("rewards", "eval")})
    base |= {"eval": defaults["eval"] | {"every": 2}, "name": name, "output": str(place / "runs")}
    given = {"train_prompts": PROMPTS[:7], "eval_prompts": PROMPTS[7:], "rewards": redness}
    return Trainer(place / "flux", **merged(base, given | arguments))


def redness(images, prompts, **columns):
    return [float(image[..., 0].mean()) / 255 for image in images]


def brighter(prompt, image_a, image_b):
    a, b = (float(image.mean()) for image in (image_a, image_b))
    return 0.5 if a == b else float(a > b)


def process_state():
    """Settings of the process that a program's other code sees as well."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    return {
        "verbosity": [library.get_verbosity() for library in libraries],
        "bars": [library.is_progress_bar_enabled() for library in libraries],
        "attention": _AttentionBackendRegistry.get_active_backend()[0],
        "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "precision": torch.get_float32_matmul_precision(),
        "rng": torch.get_rng_state().tolist(),
        "level": logging.getLogger().level,
    }


def test_it_is_the_recipes_run_bit_for_bit(place):
    file = recipe(place, "yaml")
    trained(file)
    before = process_state()
    result = Trainer.from_recipe(file, name="python").train()
    assert process_state() == before, "a run changes no setting of the process"
    assert result.folder == place / "runs" / "python" and rows(result.folder) == rows(place / "runs" / "yaml")
    assert weights(result.folder) == weights(place / "runs" / "yaml")
    assert result.lora == result.folder / "lora" and result.pipeline is None and result.report.is_file()
    assert result.win_rate == result.metrics["dev/win_jpeg_incompressibility"] and "eval at step 4" in result.summary
    again = Trainer.from_recipe(
        file, model=place / "flux", steps=3, lora_rank=8, rollout={"eta": 0.5}, seed=3, name="again"
    )
    c = again.config
    assert (c.train.steps, c.train.lora_rank, c.rollout.eta, c.seed, c.train.lr) == (3, 8, 0.5, 3, 1e-2)


def test_functions_and_open_rewards_are_rewards_and_every_callback_is_called(place):
    seen = {"step": [], "evaluation": [], "save": []}
    one = trainer(
        place, "functions", rewards={redness: 0.5, brighter: 0.25, JpegCompressibility(): 0.25}, steps=2,
        checkpoint={"every": 1}, on_step=lambda step, metrics: seen["step"].append((step, metrics["reward/redness"])),
        on_evaluation=lambda step, name, metrics: seen["evaluation"].append((step, name)),
        on_save=lambda path: seen["save"].append(path.name),
    )  # fmt: skip
    assert one.config.family == "flux" and {e.name: e.weight for e in one.config.rewards} == {
        "redness": 0.5, "brighter": 0.25, "jpeg_compressibility": 0.25,
    }  # fmt: skip
    result = one.train()
    found = [row for row in rows(result.folder) if row["kind"] == "train"]
    assert [step for step, _ in seen["step"]] == [1, 2] and seen["step"][0][1] == found[0]["reward/redness"]
    assert seen["evaluation"] == [(0, "dev"), (2, "dev")] and seen["save"] == ["step_000001", "step_000002"]
    assert {"reward/brighter", "reward/jpeg_compressibility"} <= found[0].keys()
    own = {"redness", "brighter", "jpeg_compressibility"}
    assert rewards_of_step(found[0]).keys() == own
    measured = [read_comparison("dev", row) for row in rows(result.folder) if row["kind"] == "eval"]
    assert [one.measures.keys() for one in measured] == [{Subject(name) for name in own}] * 2


@pytest.mark.full
def test_a_run_with_functions_is_resumed_by_its_program_only(place):
    trainer(place, "resumed", steps=2).train()
    config = place / "runs" / "resumed" / "config.yaml"
    code, output = train(config, "--resume", "--train.steps", "4")
    assert code == 2 and f"redness is {__name__}.redness, which exists only in the Python program" in output
    result = trainer(place, "resumed", steps=4, resume=True).train()
    straight = trainer(place, "straight", steps=4).train()
    assert rows(result.folder) == rows(straight.folder) and weights(result.folder) == weights(straight.folder)


def test_a_judge_in_this_process_and_one_over_http_inside_a_running_event_loop(place):
    local = trainer(place, "local", rewards=PairwiseJudge(str(JUDGE), template="caption_match"), steps=1,
                    eval={"every": 1}).train()  # fmt: skip
    assert local.win_rate == local.metrics["dev/win_judge"]
    with JudgeServer() as server:
        judge = PairwiseJudge(server.url, timeout_s=5.0, deadline_s=20.0)
        one = trainer(place, "http", rewards={judge: 0.7, redness: 0.3}, steps=1)

        async def notebook():
            return one.train()

        assert "reward/vlm_pairwise" in rows(asyncio.run(notebook()).folder)[-2]


def test_off_the_main_thread(place):
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer(place, "thread", steps=1).train()))
    thread.start()
    thread.join()
    assert load_file(results[0].lora / "pytorch_lora_weights.safetensors")


@pytest.mark.full
def test_a_run_never_lets_torch_choose_cudnn_attention(place, monkeypatch):
    """In text encoders, denoiser, its backward, rewards and evaluation; whatever ends the run, the flag is restored."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    seen = {}

    def note(part):
        seen.setdefault(part, set()).add(allowed())

    def noting(images, prompts):
        note(f"reward in {'main' if threading.current_thread() is threading.main_thread() else 'another'} thread")
        return redness(images, prompts)

    def interrupts(step, metrics):
        raise KeyboardInterrupt

    def note_backward(module, inputs, outputs):
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda _: note("backward"))

    load = models_base.Adapter.load.__func__

    def hooked(cls, *args, **options):
        adapter = load(cls, *args, **options)
        for name in ("text_encoder", "text_encoder_2", "transformer"):
            module = getattr(adapter.pipe, name)
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
        adapter.transformer.register_forward_hook(note_backward)
        return adapter

    monkeypatch.setattr(models_base.Adapter, "load", classmethod(hooked))
    assert allowed(), "torch's default"
    trainer(place, "kernels", rewards=noting, steps=2).train()
    assert allowed()
    parts = {"text_encoder", "text_encoder_2", "transformer", "backward"}
    assert parts <= seen.keys() and any(part.startswith("reward") for part in seen)
    assert set.union(*seen.values()) == {False}, seen
    with pytest.raises(ConfigError, match="fa4 is for GPUs"):
        trainer(place, "refused", attention="fa4")
    assert allowed()
    with pytest.raises(KeyboardInterrupt):
        trainer(place, "interrupted", steps=1, on_step=interrupts).train()
    assert allowed()
    one = trainer(place, "open", steps=1)
    trainer(place, "beside", steps=1).train()
    assert not allowed(), "a run is open"
    one.close()
    assert allowed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout": {"group_size": 1, "eta": -1}}, r"rollout.eta: .*\n.*rollout.group_size: "),
        ({"rewards": {redness: "much"}}, "weight of reward 'redness': expected a finite number, got 'much'"),
        ({"rewards": lambda x: 1}, r"a reward function takes \(images, prompts, …\)"),
        ({"rewards": [redness, redness.__class__(redness.__code__, globals(), "redness")]}, "redness is given twice"),
        (
            {"rewards": ["oct", {"name": "ocr", "options": {"detekt": 2}}], "eval": {"rewards": "a.py:b"}},
            r"rewards: unknown reward 'oct'.*\n.*'ocr' has no option 'detekt'[^\n]*'detect'.*\n.*eval.rewards: ",
        ),
        ({"rewards": 7}, "rewards: expected a name, a PairwiseJudge, a reward or a function, got 7"),
        ({"train_prompts": []}, "train_prompts: expected at least one prompt"),
        ({"rewards": max}, "a reward function must have a signature"),
        ({"model": "nowhere"}, "model: model folder not found: 'nowhere'"),
    ],
)
def test_every_mistake_is_told_before_anything_starts(place, arguments, message):
    with pytest.raises(ConfigError, match=message):
        if "model" in arguments:
            Trainer("nowhere", train_prompts=PROMPTS)
        else:
            trainer(place, "wrong", **arguments)
    assert not (place / "runs" / "wrong").exists()


def test_the_values_of_the_models_folder_are_the_defaults(place):
    """As for the command: its prefgrpo.yaml makes a tiny pipeline run."""
    one = Trainer(
        place / "flux", rewards=redness, steps=1, rollout={"steps": 3}, output=str(place / "runs"), name="own"
    )
    one.close()
    r = one.config.rollout
    assert (r.height, r.width, r.window_size, r.steps, one.config.data.max_length) == (32, 32, 1, 3, 128)


def test_prompts_may_have_columns(place):
    def tagged(images, prompts, tag):
        assert all(prompt == f"a {t} circle" for prompt, t in zip(prompts, tag, strict=True))
        return [float(len(t)) for t in tag]

    prompts = [{"prompt": f"a {tag} circle", "tag": tag} for tag in ("red", "green", "blue")]
    one = trainer(place, "columns", train_prompts=prompts, eval_prompts=0.0, rewards=tagged, steps=1)
    assert rows(one.train().folder)[0]["reward/tagged"] > 0
    same = trainer(place, "other", train_prompts=prompts, rewards=tagged)
    assert same.config.data.prompts == one.config.data.prompts, "equal prompts, different file names"


@pytest.mark.parametrize("family", MODELS)
def test_the_family_follows_from_the_folder(tmp_path, family):
    assert family_of(str(pipelines.make(family, tmp_path / family))) == family


def test_a_hub_id_may_carry_a_revision(monkeypatch, place):
    assert hub_id("org/name@v1.0") == ("org/name", "v1.0") and hub_id("org/name") == ("org/name", None)
    asked = []
    fetch = lambda name, revision=None, **_: asked.append((name, revision)) or str(place / "flux")  # noqa: E731
    monkeypatch.setattr("diffusers.DiffusionPipeline.download", fetch)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate("org/name@refs/pr/3") == (place / "flux").resolve()
    assert set(asked) == {("org/name", "refs/pr/3")}
    asked.clear()
    one = Trainer("org/name@abc123", train_prompts=PROMPTS, rewards=redness, output=str(place / "runs"), dtype="fp32")
    assert one.config.model == "org/name@abc123" and one.config.family == "flux"
    assert set(asked) == {("org/name", "abc123")}


@pytest.mark.full
def test_the_documentations_examples_run(root, tmp_path, monkeypatch):
    """All code blocks of docs/python.md, in order, in a folder with the demo's assets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefgrpo").symlink_to(root / "prefgrpo")
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "python.md").read_text(), re.S | re.M)
    assert len(blocks) == 4
    names = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert len(names["metrics"]) == 1 and names["result"].summary == "" and names["result"].report.is_file()
    assert [row["step"] for row in rows(tmp_path / "runs" / "brighter")] == [1, 2]
