"""The configuration of a run: frozen dataclasses, a YAML recipe, and one validation pass.

Invariant: `load` either returns a configuration that can run or raises one ConfigError that lists every
mistake of the recipe at once. Defaults are safe for FLUX.1-dev; recipes set what differs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from prefgrpo.config.limits import check
from prefgrpo.config.recipe import ConfigError, copy_tree, drop, drop_booleans, flatten, key_path, merged, read_yaml

__all__ = ["Config", "ConfigError", "check", "differences", "from_dict", "load", "parse", "to_dict"]

MODEL_VALUES = "prefgrpo.yaml"
"""File of a model folder with the values that this model needs in any recipe."""
STRICT = ConfigDict(extra="forbid")


def _options(text: str) -> dict[str, dict[str, Any]]:
    """Options per reward from one YAML or JSON text (on the command line)."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML or JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise ValueError(f"expected options per reward, e.g. '{{clip: {{device: cpu}}}}', got {text!r}")
    return value


Options = Annotated[
    dict[str, dict[str, Any]],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: _options(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""Options per reward."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts and their embeddings."""

    prompts: str = ""
    """Training prompts: a UTF-8 text file, one per line."""
    max_length: int = 512
    """Longest prompt in tokens for the long text encoder (T5); longer ones are cut by it."""
    cache: str = ""
    """Folder for prompt embeddings kept between runs; empty: memory only."""
    own_sizes: bool = False
    """Train and generate each prompt at the size in its own `height` and `width` columns, where it has them."""


@dataclass(frozen=True)
class SamplingConfig:
    """How training images are made."""

    height: int = 512
    """Image height in pixels."""
    width: int = 512
    """Image width in pixels."""
    steps: int = 10
    """T, denoising steps."""
    sigmas: Literal["pipeline", "published"] = "pipeline"
    """pipeline: the sigmas of the model folder's own scheduler for this size and step count. published:
    shift·s / (1 + (shift − 1)·s) on linspace(1, 0, steps + 1), whatever that scheduler says (Pref-GRPO, DanceGRPO)."""
    shift: float | None = None
    """Time shift of the published sigmas; the pipeline's sigmas take none."""
    frames: int | None = None
    """Frames per clip; none: the video family's own number (image families take none)."""
    guidance: float = 3.5
    """Guidance scale."""
    guidance_2: float | None = None
    """Guidance scale of the second expert (Wan2.2); none: the family's own."""
    source_area: int | None = None
    """Pixels that source images become, for editing families that resize them (Qwen-Image-Edit); none: as the published
    pipeline does, about a million."""
    truncate_timesteps: bool = False
    """Show the model int(1000 σ) as time, as the published trainers do, instead of the exact 1000 σ."""
    rule: str = "flow"
    """Step rule of the stochastic steps: flow, dance, cps, cps_normalised, ddim, wan or ode."""
    eta: float = 0.7
    """Noise level η of the rule."""
    window_low: int = 0
    """First step that may be stochastic and trained."""
    window_high: int = 0
    """One past the last such step; 0: all but the last step."""
    window_size: int = 0
    """Consecutive steps per rollout, drawn anew inside the range; 0: the whole range."""
    prompts_per_step: int = 8
    """P, prompts per training step over all processes."""
    group_size: int = 8
    """G, images per prompt."""
    batch_size: int = 8
    """Images per forward, in rollout and in training alike. A divisor of group_size keeps the first ratio exactly 1;
    in batches of several groups, those without signal are left out of training, and rounding differs."""
    same_noise: bool = False
    """Start all images of a prompt from one initial latent (`init_same_noise`)."""


@dataclass(frozen=True)
class JudgeConfig:
    """The vision-language judge, how it is asked, and what its answers are used for."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of servers of the same model, with or without /v1; requests go to the least loaded living one."""
    model: str = ""
    """http: the served model's name (empty: the only one served); local: folder or hub id of the checkpoint."""
    template: str = ""
    """Prompt template and how its answer is read: a shipped name (compare, caption_match, …) or a YAML file's path;
    empty: compare. Rewards other than vlm_pairwise have templates of their own (reward.options.NAME.judge.template)."""
    tokenizer: str = ""
    """Folder or hub id of the judge's tokenizer, for exact label ids over http; empty: labels by token text."""
    backend: Literal["local", "http"] = "http"
    """local: transformers in this process; http: an OpenAI-compatible server (vLLM, SGLang)."""
    plan: str = "both_orders"
    """Which pairs are asked: both_orders, round_robin, k_regular(n), budget(n), swiss(n) or tournament."""
    verdict: Literal["soft", "hard"] = "soft"
    """Win rates from probabilities, or from won/tied/lost comparisons."""
    rate: Literal["win_rate", "bradley_terry"] = "win_rate"
    """Mean over the comparisons that were made, or the estimate of it from all of them (plans that skip pairs)."""
    bias: float | Literal["fit"] = 0.0
    """Position bias in logits that is taken out of verdicts, or fit: estimated in each group (one-order plans)."""
    min_label_mass: float = 0.01
    """A soft verdict is missing if the two labels together have less probability than this."""
    concurrency: int = 64
    """Most requests in flight per endpoint, of all processes together (each has its share, at least 1)."""
    api_key_env: str = ""
    """Environment variable that holds the API key, if the server wants one."""
    image_format: Literal["jpeg", "png", "webp"] = "jpeg"
    """Encoding of images on the wire; jpeg is quality 95."""
    max_pixels: int = 2048 * 2048
    """Larger images are made smaller before a judge over http sees them; 0: never."""
    media_ids: Literal["auto", "on", "off"] = "auto"
    """Send each image once and then its id: on vLLM servers (auto), always or never."""
    timeout_s: float | None = None
    """Time limit of one request; none: the template's, 60 s where one token is the answer, 600 s where text is."""
    deadline_s: float | None = None
    """Time limit of one step's judging, retries and a restarting server included; none: ten requests' time."""
    patience_s: float | None = None
    """How long requests wait for a server while none is reachable; none: deadline_s, or 600 s without one."""
    retries: int = 5
    """Repetitions of a failed request."""
    hedge_s: float = 0.0
    """Send a request that takes longer than this to a second server too; the first answer counts. 0: never."""
    log: bool = True
    """Write every comparison of training to judgements.jsonl (about 250 bytes each, no pixels)."""
    cache: bool | str = True
    """Keep answers, so that a resumed step does not ask again: true for the run folder (verdicts/, at most 32 MiB per
    rank), or the path of another folder."""
    max_missing: float = 0.1
    """Largest share of missing rewards, and of comparisons without a verdict, in a step; above it the run stops with a
    checkpoint."""
    patience_steps: int = 3
    """Steps in a row without information (all ties, always the same side, contradictions when swapped) after which the
    run stops with a checkpoint; 0: only warn."""

    def override(self, own: Mapping[str, Any]) -> JudgeConfig:
        """This section with other values of some fields. Raises ConfigError for unknown fields and wrong types."""
        try:
            return TypeAdapter(JudgeConfig).validate_python(asdict(self) | dict(own))
        except ValidationError as error:
            raise ConfigError([_explain(("judge", *map(str, item["loc"])), item) for item in error.errors()]) from error


@dataclass(frozen=True)
class RewardConfig:
    """What is optimised."""

    spec: str = "vlm_pairwise"
    """Rewards and weights, e.g. "vlm_pairwise:0.7,clip:0.3"; weight 0 is logged and not trained on."""
    options: Options = field(default_factory=dict)
    """Per reward: its options; `url` of its server; `judge`: what differs from the judge section."""
    combine: Literal["weighted_sum", "weighted_advantage_sum"] = "weighted_sum"
    """Sum rewards and then normalise, or normalise each and then sum (as Pref-GRPO does; GDPO)."""
    std: Literal["group", "global", "none"] = "group"
    """Whose standard deviation divides the advantage (none: Dr. GRPO)."""
    eps: float = 1e-4
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 0
    """Standard deviations divide by n − ddof; 1 is torch.std's, which Pref-GRPO and DanceGRPO use."""
    batch_norm: bool = False
    """Divide the step's advantages by their own standard deviation, over all ranks (Pref-GRPO's `--apply_gdpo`)."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimiser and the policy loss."""

    steps: int = 300
    """Training steps: one rollout of all prompts_per_step groups each."""
    max_minutes: float = 0.0
    """End after this many minutes of training; 0: no limit."""
    lora_rank: int = 64
    """Rank of the LoRA on the transformer; 0: full fine-tuning."""
    lora_alpha: int = 128
    """LoRA alpha; the update is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the Linear layers LoRA wraps, by their ending; empty: the family's own list."""
    target_components: tuple[str, ...] = ()
    """Which denoisers train where there are several (Wan2.2: transformer, transformer_2); empty: all."""
    lr: float = 5e-5
    """AdamW's learning rate."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.999
    """AdamW's second decay."""
    weight_decay: float = 1e-4
    """AdamW's weight decay."""
    warmup_steps: int = 0
    """Optimiser updates of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this."""
    updates_per_rollout: int = 1
    """Optimiser updates per rollout, each on its share of the batches; the first is on-policy."""
    objective: Literal["grpo"] = "grpo"
    """Policy loss."""
    clip_range: float = 1e-4
    """PPO clip of the mean-log-prob ratio, below 1."""
    clip_range_high: float | None = None
    """Clip above 1; none: the same as clip_range."""
    adv_clip_max: float = 5.0
    """Advantages are clamped to ± this."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting policy (LoRA switched off); 0: not computed."""
    kl_form: Literal["gaussian", "flow_grpo"] = "gaussian"
    """gaussian: mean_D (μ − μ_ref)² / 2s² with the step's variance s²; flow_grpo: that times |Δσ|, as in Flow-GRPO's
    SD3 and FLUX trainers, whose variance leaves out the length of the step."""
    ema_decay: float = 0.0
    """Exponential moving average of the trained weights, used for evaluation and export; 0: none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    checkpointing_share: float = 1.0
    """Share of the repeated blocks that gradient_checkpointing recomputes, evenly spread; the others stay in memory."""
    replay_batch: int = 0
    """Images per forward when stored steps are trained on: as many steps of a batch as fit are replayed at once. The
    first ratio is then 1 up to rounding only. 0: one step at a time, as in the rollout."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation with the ODE rule on held-out prompts, against the starting policy."""

    every: int = 50
    """Training steps between evaluations; 0: none."""
    prompts: str = ""
    """Held-out prompts watched during training; empty: those of `holdout`."""
    final_prompts: str = ""
    """Untouched prompts, evaluated only at the start and the end of the run."""
    holdout: float = 0.05
    """Share of data.prompts that is never trained on and watched instead, drawn by the seed: at most max_prompts (64 if
    that is 0), and none of fewer than 20 prompts or where prompts or final_prompts names a file."""
    samples_per_prompt: int = 1
    """Images per held-out prompt."""
    max_prompts: int = 0
    """Use only the first so many held-out prompts; 0: all."""
    height: int | None = None
    """Image height in pixels of evaluation and `generate`; none: rollout's. Likewise the fields below."""
    width: int | None = None
    """Image width in pixels."""
    frames: int | None = None
    """Frames per clip."""
    steps: int | None = None
    """Denoising steps."""
    guidance: float | None = None
    """Guidance scale."""
    guidance_2: float | None = None
    """Guidance scale of the second expert."""
    spec: str = ""
    """Rewards that only measure, e.g. "scenes"; they never enter training."""
    options: Options = field(default_factory=dict)
    """Options of these rewards, as in reward.options."""
    judge: bool = True
    """Also ask the judge for the win rate against the starting policy, in both orders."""
    show: int = 12
    """Images per evaluation kept for the report."""


@dataclass(frozen=True)
class MemoryConfig:
    """What lies where, and how much is decoded at once. None of it changes what is computed, but for vae_tiling."""

    offload: tuple[Literal["text_encoder", "vae"], ...] = ()
    """Parts that wait in the CPU's memory and come to the device for their work only."""
    decode_batch: int = 0
    """Images or clips per call of the VAE's decoder; 0: rollout.batch_size."""
    vae_slicing: bool = False
    """Let the VAE take images of a batch one by one."""
    vae_tiling: bool = False
    """Let the VAE work on overlapping tiles, blended; large images then differ a little."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving."""

    every: int = 20
    """Training steps between checkpoints."""
    keep: int = 2
    """How many of the latest checkpoints stay."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: str = ""
    """The diffusers pipeline to train: a folder or a hub id."""
    family: str = "flux"
    """Model family (an adapter in prefgrpo/models)."""
    name: str = "run"
    """Name of the run; everything it writes lies in output/name."""
    output: str = "runs"
    """Folder of the runs."""
    seed: int = 0
    """Seed of prompts, noise, pair orders and LoRA initialisation."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of the frozen weights and of the forward; LoRA and optimiser are fp32."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    gpus: int = 1
    """GPUs that a recipe is sized for: `prefgrpo plan` counts with as many. What a run has, torchrun decides."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


for _cls in (
    DataConfig,
    SamplingConfig,
    JudgeConfig,
    RewardConfig,
    TrainConfig,
    EvalConfig,
    CheckpointConfig,
    MemoryConfig,
    Config,
):
    setattr(_cls, "__pydantic_config__", STRICT)  # noqa: B010  (a class attribute would become a field)


def load(recipe: str | Path) -> Config:
    """Configuration from a YAML recipe. Raises ConfigError with every mistake in it."""
    config, mistakes = parse(recipe)
    if mistakes := mistakes + check(config):
        raise ConfigError(mistakes)
    return config


def parse(recipe: str | Path, model: str = "") -> tuple[Config, list[str]]:
    """(configuration, mistakes in keys and types) of a YAML recipe; wrong entries are left at their defaults.

    model: replaces the recipe's. A folder may hold a recipe of its own, MODEL_VALUES, whose values then replace those
    that were written for another model (a tiny pipeline cannot draw 720 pixels).
    Values are not judged yet (`check`), because overrides may still change them. Raises ConfigError if a file is
    missing or no YAML mapping.
    """
    values, own = read_yaml(recipe), Path(model) / MODEL_VALUES
    if model and values.get("model") != model and own.is_file():
        values = merged(values, read_yaml(own))
    return _typed(values)


def from_dict(content: Mapping[str, Any]) -> Config:
    """Configuration from nested dicts: keys, types and values are all checked before anything is raised."""
    config, mistakes = _typed(copy_tree(content))
    if mistakes := mistakes + check(config):
        raise ConfigError(mistakes)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict (tuples become lists), as written to the run folder."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted field name → (value in a, value in b) where they differ."""
    left, right = flatten(asdict(a)), flatten(asdict(b))
    both = dict.fromkeys([*left, *right])  # options of rewards may be in one only
    return {key: (left.get(key), right.get(key)) for key in both if left.get(key) != right.get(key)}


def _typed(data: dict[str, Any]) -> tuple[Config, list[str]]:
    """Config from `data` with wrong entries left at their defaults, and what was wrong with them."""
    adapter = TypeAdapter(Config)
    mistakes = drop_booleans(data, adapter.dump_python(Config()))
    while True:
        try:
            return adapter.validate_python(data), mistakes
        except ValidationError as error:
            paths = {key_path(item["loc"], data): item for item in error.errors()}
            mistakes += [_explain(path, item) for path, item in paths.items()]
            for path in paths:
                drop(data, path)


def _explain(path: tuple[str, ...], item: Any) -> str:
    name = ".".join(path)
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{name}: unknown key; {nearest(path)}"
    return f"{name}: {item['msg'].replace('tuple', 'list')}, got {item['input']!r}"


def nearest(path: tuple[str, ...]) -> str:
    """What may have been meant by a key that is none: "did you mean 'train.lr'?", or the keys of its section."""
    cls: Any = Config
    for key in path[:-1]:
        cls = get_type_hints(cls).get(key, Config)
    known, key = [f.name for f in fields(cls)], path[-1]
    initials = "".join(word[:1] for word in key.split("_"))
    near = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        or [name for name in known if name == initials]
        or [name for name in flatten(asdict(Config())) if name.split(".")[-1] in (key, initials)]
        or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    )
    if not near:
        return f"known keys here: {', '.join(known)}"
    return f"did you mean '{near[0] if '.' in near[0] else '.'.join((*path[:-1], near[0]))}'?"
