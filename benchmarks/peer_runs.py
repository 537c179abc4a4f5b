"""`python -m benchmarks.peer_runs PEER`: a peer's own training script, unedited, on a small pipeline, in this process.

Packages that its script imports but that are not installed have substitutes: settings, a `wandb` that records what is
logged, and CUDA functions mapped to this CPU for scripts that require GPUs. The run ends after `--steps` training
steps. Written to `--out`: for each training step its losses and seconds of this process (without text encoders).
Invariant: no file of a peer is edited or copied.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from prefgrpo.ops import native  # noqa: F401  # its table of dtypes is made at import
from prefgrpo.tiny import pipelines

WIDE = {
    "flux": {
        "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64, "num_attention_heads": 4,
        "axes_dims_rope": (16, 24, 24),
    },
    "sd3": {
        "num_layers": 6, "attention_head_dim": 64, "num_attention_heads": 4, "caption_projection_dim": 256,
    },
}  # fmt: skip
"""Changes that make a family's transformer six blocks of width 256."""


@dataclass(frozen=True)
class Work:
    """The work of one training step."""

    size: str = "tiny"
    """tiny, or wide: six blocks of width 256."""
    side: int = 32
    """Height and width of the images: twice the latents', because the VAE halves each side once."""
    prompts: int = 2
    group: int = 4
    steps: int = 6
    trained: int = 5
    """Number of stored steps trained on: the peers leave out the last."""
    updates: int = 2
    batch: int = 4
    """Samples per forward, of one prompt."""
    kl: float = 0.04
    lora: int = 32
    published: bool = False
    """Whether trained steps and memory are as in the peer's launch script: DanceGRPO and Pref-GRPO recompute
    activations and train 60 % of the steps, Flow-Factory trains one of the second to fourth; otherwise all."""


def make_pipeline(family: str, folder: Path, work: Work) -> Path:
    """Write the family's pipeline, tiny or wide, and prompts; FLUX has 16 latent channels, as two peers require."""
    torch.manual_seed(0)
    pipe = pipelines.FAMILIES[family]()
    changes = dict(WIDE[family]) if work.size == "wide" else {}
    if family == "flux":
        changes["in_channels"] = 64
        pipe.vae = pipelines.image_vae(16)
    pipe.transformer = type(pipe.transformer).from_config(dict(pipe.transformer.config) | changes)
    pipe.save_pretrained(folder)
    prompts = [f"a {colour} {shape}\n" for colour in ("red", "green") for shape in ("cube", "ball")]
    (folder / "train.txt").write_text("".join(prompts))
    (folder / "test.txt").write_text("a red cube\n")
    return folder


# ---- recording ------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Splits what a trainer logs into training steps, and ends the run after enough of them.

    A step ends with its `per_step`-th entry that holds the key `loss`.
    """

    loss: str
    per_step: int
    steps: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    encoding: float = 0.0
    """Seconds in text encoders since the step began."""

    def __post_init__(self) -> None:
        self._losses: list[dict[str, float]] = []
        self._start = time.process_time()

    def log(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        """Record one entry, like wandb.log."""
        if self.loss not in data:
            return
        kept = [key for key in data if any(word in key for word in ("loss", "kl", "grad_norm"))]
        self._losses.append({key: float(data[key]) for key in kept})
        if len(self._losses) < self.per_step:
            return
        seconds = time.process_time() - self._start - self.encoding
        self.rows.append({"seconds": seconds, "losses": self._losses})
        if len(self.rows) == self.steps:
            raise SystemExit(0)
        self._losses, self.encoding = [], 0.0
        self._start = time.process_time()

    def leave_out(self, cls: type[Any]) -> None:
        """Exclude the seconds that a text encoder's forward takes."""
        forward = cls.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return forward(*args, **kwargs)
            finally:
                self.encoding += time.process_time() - start

        cls.forward = timed


# ---- substitutes for packages that are not installed -----------------------------------------------------------------


class Settings(dict[str, Any]):
    """ml_collections' ConfigDict: a dict whose keys are attributes too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Anything:
    """Stub for any attribute of a package that the run does not need."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    __call__ = __init__


def module(name: str, **contents: Any) -> ModuleType:
    """Register a module with this name and these contents in sys.modules."""
    made = ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


def absent(*names: str) -> None:
    """Register modules with these names, whose every attribute is `Anything`."""
    for name in names:
        made = module(name)
        made.__getattr__ = lambda name: Anything  # type: ignore[method-assign]
        made.__path__ = []


def ml_collections() -> None:
    """ConfigDict, and the flag `--config FILE.py:FUNCTION`."""
    from absl import flags

    class Parser(flags.ArgumentParser):  # type: ignore[misc]
        def parse(self, argument: Any) -> Any:
            file, _, function = str(argument).partition(":")
            return runpy.run_path(file)[function]() if function else None

    def define(name: str, default: str, help_text: str = "", **_: Any) -> None:
        flags.DEFINE(Parser(), name, default, help_text)

    made = module("ml_collections", ConfigDict=Settings)
    made.config_flags = module("ml_collections.config_flags", DEFINE_config_file=define)  # type: ignore[attr-defined]


# ---- the peers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A peer's trainer: its location, and how to start it on a pipeline folder."""

    codebase: str
    family: str
    checkout: str
    script: str
    prepare: Callable[[Path, Path, Work], list[str]]
    """(checkout, pipeline folder, work) → the script's arguments; installs the substitutes."""
    loss: str
    per_step: Callable[[Work], int]
    """Number of log entries with a loss per training step."""


def flow_grpo(family: str) -> Callable[[Path, Path, Work], list[str]]:
    """Flow-GRPO's scripts: settings of its published OCR recipe, with this work."""

    def prepare(root: Path, folder: Path, work: Work) -> list[str]:
        import peft

        ml_collections()
        # accelerate wraps a model in DDP only with several processes, but the scripts always use `.module`
        peft.PeftModel.module = property(lambda model: model)  # type: ignore[attr-defined]
        published = "general_ocr_sd3" if family == "sd3" else "pickscore_flux"
        batches = work.prompts * work.group // work.batch
        changes = {
            "pretrained.model": str(folder), "dataset": str(folder), "resolution": work.side, "mixed_precision": "no",
            "reward_fn": {"jpeg_compressibility": 1.0}, "prompt_fn": "general_ocr", "logdir": "logs",
            "save_dir": "save", "save_freq": 10**9, "eval_freq": 10**9, "sample.num_steps": work.steps,
            "sample.eval_num_steps": 1, "sample.train_batch_size": work.batch,
            "sample.num_image_per_prompt": work.group,
            "sample.num_batches_per_epoch": batches, "sample.test_batch_size": 1, "train.batch_size": work.batch,
            "train.gradient_accumulation_steps": batches // work.updates, "train.beta": work.kl,
        }  # fmt: skip
        (folder / "settings.py").write_text(
            "import runpy\n"
            f"published = runpy.run_path({str(root / 'config/grpo.py')!r})[{published!r}]\n"
            f"changes = {changes!r}\n"
            "def get():\n"
            "    config = published()\n"
            "    for name, value in changes.items():\n"
            "        *path, last = name.split('.')\n"
            "        part = config\n"
            "        for key in path:\n"
            "            part = part[key]\n"
            "        part[last] = value\n"
            "    return config\n"
        )
        return ["--config", f"{folder / 'settings.py'}:get"]

    return prepare


def without_autocast() -> None:
    """Disable torch.autocast: losses can be equal only in float32."""
    autocast = torch.autocast
    torch.autocast = lambda *_, **__: autocast("cpu", enabled=False)  # type: ignore[assignment, misc]


def on_cpu() -> None:
    """Map the CUDA functions that two peers' scripts call to the CPU, and bfloat16 to float32, so that losses can be
    equal. Their gradient all-reduce runs over one process.
    """
    from torch import distributed as dist
    from torch.utils.data import DataLoader

    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(environment)
    start = dist.init_process_group
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group = lambda *_, **__: start("gloo", store=store, rank=0, world_size=1)
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    without_autocast()
    torch.bfloat16 = torch.float32  # type: ignore[misc]
    batches, listed = DataLoader.__iter__, lambda data: list(data) if isinstance(data, tuple) else data
    # pinning memory turns tuples into lists, on which the scripts rely
    DataLoader.__iter__ = lambda loader: ([listed(part) for part in batch] for batch in batches(loader))


def embeddings(folder: Path) -> Path:
    """Write text embeddings of the prompts in the form of DanceGRPO's preprocessing; returns their table."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(str(folder), transformer=None, vae=None)
    table = []
    for k, prompt in enumerate((folder / "train.txt").read_text().splitlines()):
        with torch.no_grad():
            states, pooled, ids = pipe.encode_prompt(prompt, prompt, max_sequence_length=128)
        row = {"prompt_embed_path": states[0], "pooled_prompt_embeds_path": pooled[0], "text_ids": ids[0]}
        for name, tensor in row.items():
            path = folder / name.removesuffix("_path") / f"{k}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(tensor.clone(), path)
        table.append(dict.fromkeys(row, f"{k}.pt") | {"caption": prompt})
    (folder / "table.json").write_text(json.dumps(table * 200))  # one checkpoint is saved per pass
    return folder / "table.json"


def red_pickscore() -> None:
    """Stubs for PickScore's processor and model; the score is the mean red value of an image."""
    import transformers

    class Processor:
        def __call__(self, images: Any = None, text: Any = None, **_: Any) -> Any:
            given = text if images is None else images
            made = transformers.BatchFeature({"given": given})
            made.to = lambda *_, **__: made
            return made

    class Model:
        logit_scale = torch.zeros(())

        def get_image_features(self, given: Any) -> Any:
            images = given if isinstance(given, list) else [given]
            red = torch.tensor([float(np.asarray(image.convert("RGB"))[..., 0].mean()) / 255 for image in images])
            return torch.stack([red.cos(), red.sin()], 1)

        def get_text_features(self, given: Any) -> Any:
            return torch.tensor([[1.0, 0.0]]).repeat(1 if isinstance(given, str) else len(given), 1)

        def eval(self) -> Any:
            return self

        def to(self, *_: Any, **__: Any) -> Any:
            return self

    transformers.AutoProcessor.from_pretrained = lambda *_, **__: Processor()
    transformers.AutoModel.from_pretrained = lambda *_, **__: Model()


def fastvideo(name: str) -> Callable[[Path, Path, Work], list[str]]:
    """DanceGRPO's and Pref-GRPO's FLUX scripts, with the settings that their launch scripts share, and this work."""

    def prepare(root: Path, folder: Path, work: Work) -> list[str]:
        table = embeddings(folder)
        torch.load(folder / "text_ids" / "0.pt", weights_only=True)  # torch.load lists the dtypes at its first call
        on_cpu()
        red_pickscore()
        hunyuan, mochi = "fastvideo.models.hunyuan", "fastvideo.models.mochi_hf"
        absent("einops", "decord", f"{hunyuan}.modules.models", f"{hunyuan}.text_encoder", f"{mochi}.pipeline_mochi",
               f"{hunyuan}.vae.autoencoder_kl_causal_3d", f"{hunyuan}_hf.modeling_hunyuan", f"{mochi}.modeling_mochi",
               "fastvideo.utils.validation")  # fmt: skip
        Path("images").mkdir()
        samples = work.prompts * work.group
        side = work.side * 4  # the scripts divide it by 8, the pipeline's VAE only by 2
        arguments = {
            "data_json_path": table, "dataloader_num_workers": 0, "train_batch_size": work.prompts,
            "train_sp_batch_size": work.prompts, "pretrained_model_name_or_path": folder, "output_dir": "output",
            "h": side, "w": side, "t": 1, "sampling_steps": work.steps, "eta": 0.3, "shift": 3, "seed": 42,
            "sampler_seed": 1223627, "max_grad_norm": 1.0, "weight_decay": 0.0001, "lr_warmup_steps": 0,
            "num_generations": work.group, "gradient_accumulation_steps": samples // work.updates, "cfg": 0.0,
            "clip_range": 1e-4, "adv_clip_max": 5.0, "learning_rate": 1e-5,
            "timestep_fraction": 0.6 if work.published else 1.0,
            "checkpointing_steps": 10**9, "max_train_steps": 10**6,
        }  # fmt: skip
        flags = ["--use_group", *(["--gradient_checkpointing"] if work.published else [])]
        if name == "pref_grpo":
            arguments |= {"grpo_step_mode": "flow", "eta": 0.7, "reward_spec": '{"pickscore": 1.0}', "exp_name": "run",
                          "num_train_epochs": 10**6, "lora_rank": work.lora, "lora_alpha": 2 * work.lora,
                          "lr_warmup_ratio": 0.0, "eval_every_steps": 0, "vae_model_path": folder,
                          "kl_beta": 0.0}  # fmt: skip
            flags += ["--use_lora", "--rationorm", "--apply_gdpo", "--init_same_noise"]
            for unused in ("max_train_steps", "lr_warmup_steps"):
                del arguments[unused]
        else:
            flags += ["--use_pickscore", "--ignore_last"]
        return [*(word for key, value in arguments.items() for word in (f"--{key}", str(value))), *flags]

    return prepare


RED_REWARD = """
import numpy as np, torch
from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
class Red(PointwiseRewardModel):
    required_fields = ("prompt", "image")
    use_tensor_inputs = False
    def __call__(self, prompt, image=None, **_):
        red = [float(np.asarray(i.convert("RGB"))[..., 0].mean()) / 255 for i in image]
        return RewardModelOutput(rewards=torch.tensor(red), extra_info={})
"""


class Rows(list[dict[str, Any]]):
    """The part of datasets.Dataset that prompts need."""

    column_names = ("prompt",)

    @staticmethod
    def from_dict(columns: dict[str, list[Any]]) -> Any:
        """Rows of columns."""
        return Rows(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def select(self, indices: Any) -> Any:
        """The rows of these indices."""
        return Rows(self[k] for k in indices)


def flow_factory(root: Path, folder: Path, work: Work) -> list[str]:
    """Flow-Factory's FLUX recipe with this work; prompts are encoded in the run, since `datasets` is not installed."""
    import yaml

    without_autocast()
    module("datasets", Dataset=Rows, load_dataset=None, load_from_disk=None).__path__ = []
    module("datasets.utils").__path__ = []
    module("datasets.utils.logging", disable_progress_bar=lambda: None)
    config = yaml.safe_load((root.parent / "examples/grpo/lora/flux1/default.yaml").read_text())
    changes: dict[str, dict[str, Any]] = {
        "data": {"dataset_dir": str(folder), "enable_preprocess": False, "dataloader_num_workers": 0,
                 "cache_dir": "cache"},
        "model": {"model_name_or_path": str(folder), "lora_rank": work.lora, "lora_alpha": 2 * work.lora},
        "log": {"save_dir": "saves", "save_freq": 0, "run_name": "run"},
        "train": {"ref_param_device": "cpu", "ema_device": "cpu", "resolution": work.side, "kl_beta": 0.0,
                  "num_inference_steps": work.steps, "per_device_batch_size": work.batch, "group_size": work.group,
                  "unique_sample_num_per_epoch": work.prompts, "gradient_step_per_epoch": work.updates,
                  "latent_storage_dtype": "fp32"},
        "scheduler": {} if work.published else {"sde_steps": None, "num_sde_steps": None},
        "eval": {"eval_freq": 0, "resolution": work.side},
    }  # fmt: skip
    for section, values in changes.items():
        config[section] |= values
    config |= {"mixed_precision": "no", "num_processes": 1}
    config["rewards"] = [{"name": "red", "reward_model": "red_reward.Red", "batch_size": 16, "device": "cpu"}]
    del config["eval_rewards"]
    (folder / "red_reward.py").write_text(RED_REWARD)
    (folder / "settings.yaml").write_text(yaml.safe_dump(config))
    sys.path.append(str(folder))
    return [str(folder / "settings.yaml")]


PEERS = {
    "flow_grpo_sd3": Peer(
        "flow_grpo", "sd3", "flow_grpo", "scripts/train_sd3.py", flow_grpo("sd3"), "loss", lambda work: work.updates
    ),
    "flow_grpo_flux": Peer(
        "flow_grpo", "flux", "flow_grpo", "scripts/train_flux.py", flow_grpo("flux"), "loss", lambda work: work.updates
    ),
    "dance_grpo_flux": Peer(
        "dance_grpo", "flux", "DanceGRPO", "fastvideo/train_grpo_flux.py", fastvideo("dance_grpo"), "train_loss",
        lambda _: 1,
    ),
    "pref_grpo_flux": Peer(
        "pref_grpo", "flux", "Pref-GRPO", "fastvideo/train_flux.py", fastvideo("pref_grpo"), "train_loss", lambda _: 1
    ),
    "flow_factory_flux": Peer(
        "flow_factory", "flux", "Flow-Factory/src", "flow_factory.train", flow_factory, "train/loss",
        lambda work: work.updates,
    ),
}  # fmt: skip


def train(peer: Peer, root: Path, folder: Path, work: Work, recorder: Recorder) -> list[dict[str, Any]]:
    """Run the peer's script to its end; returns the records of its training steps."""
    import accelerate
    import peft
    import transformers

    torch.set_num_threads(1)
    module("wandb", log=recorder.log, init=lambda *_, **__: None, Image=Anything, Video=Anything, finish=lambda: None)
    for cls in (transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection, transformers.T5EncoderModel):
        recorder.leave_out(cls)
    arguments = peer.prepare(root, folder, work)
    sys.path.insert(0, "")  # runpy puts the script's folder here
    sys.path.insert(1, str(root))
    is_module = not peer.script.endswith(".py")
    script = peer.script if is_module else str(root / peer.script)
    del accelerate, peft  # imported before the substitutes, so that they do not mistake one for a package
    try:
        sys.argv = [script, *arguments]
        run: Callable[..., Any] = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
        run(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if len(recorder.rows) < recorder.steps:
        raise RuntimeError(f"expected {recorder.steps} training steps of {peer.script}, got {len(recorder.rows)}")
    return recorder.rows


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; PREFGRPO_PEERS names the folder of the checkouts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_runs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--work", type=json.loads, default={}, help="fields of Work to override, as JSON")
    parser.add_argument("--steps", type=int, default=2, help="training steps")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args(argv)
    peer, work = PEERS[given.peer], Work(**given.work)
    recorder = Recorder(peer.loss, peer.per_step(work), given.steps)
    root = Path(os.environ["PREFGRPO_PEERS"]).resolve() / peer.checkout
    out = given.out.resolve()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        os.chdir(folder)
        rows = train(peer, root, make_pipeline(peer.family, Path(folder), work), work, recorder)
    out.write_text(json.dumps({"peer": given.peer, "work": asdict(work), "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
