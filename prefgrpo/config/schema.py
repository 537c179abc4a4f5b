"""The configuration of a run: frozen dataclasses whose types state the limits of every field.

Defaults are safe for FLUX.1-dev; recipes override them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from prefgrpo.config.rewards import RewardEntry, entries

MODEL_VALUES = "prefgrpo.yaml"
"""File in a model folder with the values that this model needs whatever the recipe."""
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""Reject unknown keys, never convert types (true to 1, 1 to "1"); the line below a field is its description."""
Share = Annotated[float, Field(ge=0, lt=1)]
Attention = Literal["native", "_native_flash", "_native_math", "fa3", "fa4", "_flash_3_hub", "_flash_3_varlen_hub"]
RULES = ("flow", "dance", "cps", "cps_normalised", "wan")
"""Step rules of `sde.rules` that can be trained with; `rollout.rule` may also name a function."""
COMBINE = ("weighted_sum", "weighted_advantage_sum", "gdpo", "geometric_mean")
"""Ways to combine rewards; `advantage.combine` may also name a function."""
SEPARATE = ("weighted_advantage_sum", "gdpo")
"""Those that normalise each reward before adding."""
Rewards = Annotated[tuple[RewardEntry, ...], BeforeValidator(entries)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Prompts, or pairs, and their embeddings."""

    prompts: str = ""
    """Training prompts: txt with one per line, or a csv, tsv, jsonl or parquet table with a prompt column."""
    pairs: str = ""
    """In place of prompts and rewards: a table of images or clips with preferences, or the folder of a run with judged
    groups (docs/pairs.md). Nothing is sampled or judged in training; groups have rollout.group_size members."""
    max_length: PositiveInt = 512
    """Maximum prompt length in tokens for the long text encoder (T5); longer prompts are truncated."""
    cache: str = ""
    """Folder of cached prompt embeddings, shared between runs; empty: memory only."""


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """How training images or clips are sampled."""

    height: PositiveInt = 512
    """Image height in pixels."""
    width: PositiveInt = 512
    """Image width in pixels."""
    steps: PositiveInt = 10
    """T, denoising steps."""
    shift: PositiveFloat | None = None
    """none: sigmas and timesteps of the model folder's own scheduler for this size and step count. A number: those of
    Pref-GRPO's and DanceGRPO's trainers, shift·s / (1 + (shift − 1)·s) on linspace(1, 0, steps + 1) and int(1000 σ)."""
    frames: PositiveInt | None = None
    """Frames per clip; none: the video family's default (image families have no frames)."""
    guidance: float = 3.5
    """Guidance scale."""
    guidance_2: float | None = None
    """Guidance scale of the second expert (Wan2.2); none: the family's default."""
    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; none: the family's own (Wan has a long one). A prompt's own, in a
    column of this name, replaces it."""
    source_area: Annotated[int, Field(ge=32 * 32)] | None = None
    """Pixels per source image, for editing families that resize sources (Qwen-Image-Edit); none: as in the published
    pipeline, about a million."""
    rule: str = "flow"
    """Step rule of the stochastic steps: flow, dance, cps, cps_normalised or wan, or a function of your own,
    file.py:function."""
    eta: NonNegativeFloat = 0.7
    """Noise level η of the rule."""
    window_low: NonNegativeInt = 0
    """First step that may be stochastic and trained."""
    window_high: NonNegativeInt = 0
    """One past the last step that may be stochastic and trained; 0: all but the last step."""
    window_size: NonNegativeInt = 0
    """Steps that are trained per rollout, chosen from the range by window_policy; 0: the whole range."""
    window_policy: Literal["random", "subset"] = "random"
    """random: consecutive steps from a start drawn for every training step (Flow-GRPO-Fast); subset: any steps, drawn
    for every training step (DanceGRPO, Pref-GRPO)."""
    sde_everywhere: bool = False
    """Make all steps stochastic, not only the trained ones (DanceGRPO, Pref-GRPO)."""
    prompts_per_step: PositiveInt = 8
    """P, prompts per training step over all processes."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, images per prompt."""
    batch_size: PositiveInt = 8
    """Images per forward, all of one prompt, in both rollout and training: a divisor of the images of a prompt that one
    update trains on (group_size, or group_size / updates_per_rollout with update_slices: members)."""
    same_noise: bool = False
    """Start all images of a prompt from one initial latent (`init_same_noise`). In each batch, the steps before the
    window are then computed once per prompt. Not for endpoint objectives, whose sampling is deterministic."""
    staleness: Literal[0, 1] = 0
    """1: generate the next step's samples while the current step is judged, before its update; ratios are relative to
    the policy that generated the samples. Never across a checkpoint; not for objectives with an old policy."""

    def mistakes(self) -> Iterator[str]:
        """Values that contradict each other, as 'field: what was expected, what was given'."""
        high = self.window_high or self.steps - 1
        if not self.eta and self.rule in RULES and self.rule != "wan":
            yield f"eta: expected a noise level above 0 to train with, got {self.eta}"
        if self.eta > 1 and self.rule in ("cps", "cps_normalised"):
            yield f"eta: rule {self.rule} takes 0 … 1, got {self.eta}"
        if not self.window_low < high <= self.steps:
            order = f"expected 0 <= low < high <= steps ({self.steps})"
            yield f"window_low/high: {order}, got {self.window_low} and {high}"
        if self.window_size > max(high - self.window_low, 0):
            yield f"window_size: expected 0 … {max(high - self.window_low, 0)}, got {self.window_size}"


@dataclass(frozen=True, config=STRICT)
class JudgeConfig:
    """Where vision-language judges are, and how they are asked: for every reward that asks one. The `judge` of a
    reward's entry replaces single values; the question is an option of the reward."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of OpenAI-compatible servers (vLLM, SGLang) of the same model, with or without /v1; requests go to the
    least-loaded healthy one. Empty: the checkpoint `model` answers in this process."""
    model: str = ""
    """The served model's name (empty: the only one served); without endpoints, the checkpoint's folder or hub id."""
    concurrency: PositiveInt = 64
    """Maximum requests in flight per endpoint, over all processes (each gets an equal share, at least 1)."""
    api_key_env: str = ""
    """Environment variable that holds the API key, if the server needs one."""
    image_format: Literal["jpeg", "png", "webp"] = "jpeg"
    """Encoding of images on the wire; jpeg is quality 95. Images above 2048² pixels are sent smaller."""
    timeout_s: PositiveFloat | None = None
    """Time limit of one request in seconds; none: the template's, 60 s for one-token answers, 600 s for text."""
    deadline_s: PositiveFloat = 600.0
    """Time limit of one step's judging in seconds, including retries and server restarts. A process that waits for
    another one gives up after twice this time."""
    max_missing: Share = 0.1
    """Largest share of missing rewards, and of comparisons without a verdict, in a step; above it the run stops with a
    checkpoint."""

    def mistakes(self) -> Iterator[str]:
        """Values that contradict each other."""
        if not self.endpoints and not self.model:
            yield "endpoints: expected at least one URL, or in `model` a judge that runs in this process, got neither"
        if wrong := [url for url in self.endpoints if not url.startswith(("http://", "https://"))]:
            yield f"endpoints: expected addresses that begin with http:// or https://, got {', '.join(wrong)}"
        if self.timeout_s and self.deadline_s < self.timeout_s:
            yield f"deadline_s: expected at least judge.timeout_s ({self.timeout_s}), got {self.deadline_s}"


@dataclass(frozen=True, config=STRICT)
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    combine: str = "weighted_sum"
    """weighted_sum: sum rewards, then normalise; weighted_advantage_sum: normalise each, then sum (Pref-GRPO); gdpo:
    then also divide by the standard deviation of all advantages of the step (Pref-GRPO's `--apply_gdpo`);
    geometric_mean: normalise this weighted mean; or a function, as file.py:function, from the rewards [R, B] of
    non-zero weight (NaN: missing) and their weights [R], fp64 tensors, to [B] values to normalise."""
    std: Literal["group", "global", "none", "rank"] = "group"
    """Standard deviation that divides the advantage: the group's, that of all samples of the step, or none (Dr. GRPO);
    rank: the group's, after each reward is replaced by its rank in the group, from 0 to 1."""
    eps: NonNegativeFloat = 1e-4
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 0
    """Standard deviations divide by n − ddof; 1 is torch.std's, which Pref-GRPO and DanceGRPO use."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The optimiser and the policy loss."""

    steps: NonNegativeInt = 300
    """Training steps, each with one rollout of prompts_per_step groups."""
    lora_rank: NonNegativeInt = 64
    """Rank of the LoRA on the transformer; 0: full fine-tuning."""
    lora_alpha: PositiveInt = 128
    """LoRA alpha; the update is scaled by alpha / rank."""
    lora_init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initialisation of LoRA's A (B is 0): Kaiming-uniform, or N(0, 1 / rank²) as peft's "gaussian" (Flow-GRPO)."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that LoRA wraps, by the ends of their names; empty: the family's default."""
    lora_from: str = ""
    """A LoRA to continue, with its rank, alpha and targets, which replace those above: a folder, a file or a hub id
    (owner/name or owner/name/FILE.safetensors, also with @revision). The reference policy is the model with it."""
    lr: PositiveFloat = 5e-5
    """Learning rate of AdamW."""
    beta2: Share = 0.999
    """AdamW's β₂; β₁ is 0.9."""
    weight_decay: NonNegativeFloat = 1e-4
    """AdamW's weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser updates of linear warm-up, counted like those of lr_scheduler."""
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: constant, or from there decaying to 0 at the end of `steps`; wsd (warm-up,
    stable, decay): constant in the first half of the run, then decaying linearly. It follows the position in the run:
    skipped updates count."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""
    updates_per_rollout: PositiveInt = 1
    """Optimiser updates per rollout, each on its share of the batches; the first is on-policy."""
    update_slices: Literal["prompts", "members"] = "prompts"
    """Each of these updates gets a share of the prompts, with all their images, or of the members (images) of every
    prompt, which objectives that compare the members of a group do not support."""
    objective: str = "grpo"
    """What is optimised (docs/objectives.md): grpo, nft, awm, soft_dpo, …, or a class of your own, as file.py:Class."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """Options of the objective, by name."""
    clip_range: PositiveFloat = 1e-4
    """PPO clip range of the ratio around 1 (log-probs are means over latent elements)."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages are clamped to ± this."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial policy; 0: not computed. For endpoint objectives the KL is mean_D (v −
    v_ref)²."""
    kl_form: Literal["gaussian", "flow_grpo"] = "gaussian"
    """gaussian: mean_D (μ − μ_ref)² / 2s² with the step's variance s²; flow_grpo: that times |Δσ|, as in Flow-GRPO's
    SD3 and FLUX trainers, whose variance omits the step length."""
    guidance_gradient: Literal["both", "conditional"] = "both"
    """With classifier-free guidance, backpropagate through both predictions, or only through the conditional one, with
    the other as a constant, which saves time and memory but changes the gradient."""
    ema_decay: Share = 0.0
    """Exponential moving average of the trained weights, used for evaluation and export; 0: none."""
    ema_every: PositiveInt = 1
    """Optimiser updates between two updates of the EMA."""
    gradient_checkpointing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the repeated blocks, evenly spread, that are recomputed in the backward pass instead of keeping their
    activations: 0 none, 1 all. Without `compile` it changes no result."""

    @property
    def swaps_reference(self) -> bool:
        """Whether the reference policy is a copy of the initial weights, and not the base without its LoRA."""
        return not self.lora_rank or bool(self.lora_from)


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Evaluation with the ODE rule on held-out prompts, against the initial policy."""

    every: NonNegativeInt = 50
    """Training steps between evaluations; 0: none."""
    prompts: Share | str = 0.05
    """Held-out prompts evaluated during training: a file, or the share of data.prompts that is held out, drawn by the
    seed: at least 32, or a quarter of a shorter file, and at most max_prompts (64 if that is 0). Nothing is held out of
    fewer than 20 prompts, if eval.final_prompts is set, or if this is 0. Of data.pairs, a held-out prompt takes all its
    groups with it; a file of pairs is held-out pairs."""
    final_prompts: str = ""
    """Test prompts, evaluated only at the start and the end of the run."""
    samples_per_prompt: PositiveInt = 1
    """Images per held-out prompt."""
    max_prompts: NonNegativeInt = 0
    """Use only the first N held-out prompts; 0: all."""
    height: PositiveInt | None = None
    """Image height in pixels for evaluation and `generate`; none: as in rollout."""
    width: PositiveInt | None = None
    """Image width in pixels; none: as in rollout."""
    steps: PositiveInt | None = None
    """Denoising steps; none: as in rollout."""
    rewards: Rewards = ()
    """Rewards that evaluation measures, written as in `rewards`; empty: those of training. An entry that is only the
    name of a trained reward is that reward. A pairwise judge compares with the initial policy, in both orders."""

    @property
    def file(self) -> str:
        """The file of held-out prompts; empty if they are a share of the training prompts."""
        return self.prompts if isinstance(self.prompts, str) else ""


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How one copy of the denoisers is distributed; every shard × ring × ulysses processes hold one, with their own
    samples (data parallel)."""

    shard: PositiveInt = 1
    """Data-parallel processes over which one copy of the denoisers' weights is sharded (FSDP2), together with their
    context-parallel processes; 1: a full copy each (in full fine-tuning still sharded over context-parallel ones)."""
    ulysses: PositiveInt = 1
    """Processes that share the tokens of each sample, and in attention its heads (Ulysses); keep within one machine."""
    ring: PositiveInt = 1
    """Processes that share the tokens of each sample and pass keys and values around (ring attention); for use across
    machines, or if ulysses does not divide the heads. Not on CPUs."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Saving."""

    every: PositiveInt = 20
    """Training steps between checkpoints."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """The configuration of a run."""

    model: str = ""
    """The diffusers pipeline to train: a folder or a hub id."""
    family: str = "flux"
    """Model family: a name in prefgrpo/models, or a class of your own, as file.py:Class."""
    name: str = "run"
    """Name of the run; everything it writes goes to output/name."""
    output: str = "runs"
    """Folder of the runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of prompts, noise, pair orders and LoRA initialisation."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of the denoiser's weights in a forward; LoRA, master weights and optimiser are fp32."""
    fp8_base: bool = False
    """Keep the Linear layers of the denoiser's repeated blocks in fp8 (docs/memory.md): half of the memory of their
    weights, and products in fp8 where the GPU has them. With a LoRA only."""
    attention: Attention = "native"
    """Attention kernels, in both rollout and training; their gradients are first compared with exact ones. native:
    torch's, never cuDNN; fa3, fa4: FlashAttention-3 and 4 (docs/scale.md); names ending in _hub download a kernel."""
    compile: bool = False
    """Compile the denoisers' repeated blocks (torch.compile), for both rollout and training. Rollouts then need as much
    memory for activations as training. Not with context parallelism."""
    vae_tiling: bool = False
    """Decode in overlapping, blended tiles, for long clips and large images, which then differ slightly."""
    offload: tuple[Literal["text_encoder", "vae", "weights"], ...] = ()
    """Parts kept in CPU memory. text_encoder, vae: moved to the GPU only while they are used. weights: the denoiser's
    shards (parallel.shard above 1) and their optimiser state; the optimiser then runs on the CPU."""
    trackers: tuple[Literal["tensorboard", "wandb", "pairs"], ...] = ("tensorboard",)
    """Where numbers and images go besides metrics.jsonl: TensorBoard events in the run folder; Weights & Biases,
    configured by its environment variables (WANDB_PROJECT, WANDB_MODE=offline); pairs: the images and verdicts of every
    judged group, in the run's folder (docs/pairs.md)."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    rewards: Rewards = (RewardEntry("vlm_pairwise"),)
    """What is optimised: entries of name, reward, weight, options and judge, or a text: "vlm_pairwise:0.7,clip:0.3"."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def mistakes(self) -> Iterator[str]:
        """Values that contradict each other, within a section and across sections."""
        r = self.rollout
        t = self.train
        if not self.model:
            yield "model: expected the folder or hub id of a diffusers pipeline, got nothing"
        if not (self.data.prompts or self.data.pairs):
            files = "a file of prompts (txt, csv, tsv, jsonl or parquet)"
            yield f"data.prompts: expected {files}, or data.pairs, got nothing"
        if self.data.pairs:
            yield from self._mistakes_with_pairs()
        if self.name in ("", ".", "..") or "/" in self.name:
            yield f"name: expected a folder name, got {self.name!r}"
        for section in ("rollout", "judge"):
            for mistake in getattr(self, section).mistakes():
                yield f"{section}.{mistake}"
        if t.lora_from and not t.lora_rank:
            yield f"train.lora_from: expected none, as train.lora_rank is 0 (all weights), got {t.lora_from!r}"
        if t.update_slices == "members" and t.updates_per_rollout > r.group_size:
            limit = f"at most group_size = {r.group_size} with train.update_slices: members"
            yield f"train.updates_per_rollout: expected {limit}, got {t.updates_per_rollout}"
        if t.kl_form != "gaussian" and r.rule in ("cps", "cps_normalised"):
            why = f"{t.kl_form} divides by a variance per unit of σ, which rule {r.rule} does not have"
            yield f"train.kl_form: {why}; expected gaussian"
        if r.staleness and self.checkpoint.every == 1:
            why = "rollout.staleness: 1 generates no samples ahead across a checkpoint"
            yield f"checkpoint.every: expected 2 or more, because {why}, got 1"
        if "weights" in self.offload and not self.shards_weights:
            yield "offload: only sharded weights can be offloaded: expected parallel.shard above 1, got 1"
        if self.fp8_base and not t.lora_rank:
            yield "fp8_base: expected false, as train.lora_rank is 0 (all weights are trained), got true"
        if self.fp8_base and self.compile:
            yield "compile: expected false with fp8_base, got true"
        if self.parallel.ring * self.parallel.ulysses > 1 and self.compile:
            yield "compile: expected false under context parallelism, got true"

    def _mistakes_with_pairs(self) -> Iterator[str]:
        """Values that say where a step's samples and verdicts come from, which data.pairs says already."""
        if self.data.prompts:
            yield f"data.prompts: expected none with data.pairs, whose rows have prompts, got {self.data.prompts!r}"
        if self.rewards:
            names = ", ".join(entry.name for entry in self.rewards)
            why = "which has verdicts; eval.rewards measures"
            yield f"rewards: expected none with data.pairs, {why}, got {names}"
        if self.rollout.staleness:
            yield f"rollout.staleness: expected 0 with data.pairs, which need no rollout, got {self.rollout.staleness}"
        if "pairs" in self.trackers:
            yield "trackers: expected no pairs with data.pairs, as nothing is judged; remove it"
        if self.advantage.combine != "weighted_sum":
            why = "as there is nothing to combine"
            yield f"advantage.combine: expected weighted_sum with data.pairs, {why}, got {self.advantage.combine}"
        if self.advantage.std == "rank":
            yield "advantage.std: expected group, global or none with data.pairs, got rank"

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling settings of evaluation and `generate`: those of training, with the fields set in `eval` replaced."""
        fields = {key: getattr(self.eval, key) for key in ("height", "width", "steps")}
        return replace(self.rollout, **{key: value for key, value in fields.items() if value is not None})

    @property
    def measured(self) -> tuple[RewardEntry, ...]:
        """The rewards of evaluation, with the options and judge of the trained reward that a bare name means."""
        trained = {entry.name: entry for entry in self.rewards}
        own = {e.name for e in self.eval.rewards if e.options or e.judge or e.reward != e.name}
        return tuple(e if e.name in own else trained.get(e.name, e) for e in self.eval.rewards) or self.rewards

    @property
    def shards_weights(self) -> bool:
        """Whether the denoisers' weights are split over processes."""
        p = self.parallel
        return p.shard > 1 or (not self.train.lora_rank and p.ring * p.ulysses > 1)

    @property
    def has_masters(self) -> bool:
        """Whether fp32 master weights are trained of denoisers that compute in another dtype."""
        return not self.train.lora_rank and self.dtype != "fp32"
