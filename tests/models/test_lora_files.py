"""LoRA files in the hands of others: read without metadata, as ComfyUI, A1111 and most converters read them.

ComfyUI's rules (comfy/lora.py and comfy/weight_adapter/lora.py): a layer is `{name}.lora_A.weight` with
`{name}.lora_B.weight`; its scale is `{name}.alpha` / rank, or 1 without that tensor; the header is never read; a name
that is not in the model's map is skipped with a line in the log. The names below are those that its maps hold.
"""

import copy
import itertools
import json
import re
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from world import CASES, case_of, load, perturb, policy

from prefgrpo.commands.cli import main
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.weights import _inject
from prefgrpo.run.log import Clock

ATTENTION = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
FLUX = (
    rf"transformer\.(transformer_blocks\.\d+\.({ATTENTION}|ff(_context)?\.(net\.0\.proj|net\.2|linear_in|linear_out))"
    r"|single_transformer_blocks\.\d+\.attn\.(to_[qkv]|to_qkv_mlp_proj))"
)
QWEN = rf"transformer\.transformer_blocks\.\d+\.({ATTENTION}|img_mlp\.(proj|gate_layer|out))"
NAMES = {
    "flux": FLUX,
    "flux_kontext": FLUX,
    "flux2": FLUX,
    "flux2_klein": FLUX,
    "qwen_image": QWEN,
    "qwen_image_21": QWEN,
    "qwen_image_edit": QWEN,
    "qwen_image_edit_plus": QWEN,
    "sd3": rf"transformer\.transformer_blocks\.\d+\.{ATTENTION}",
    "z_image": r"transformer\.(layers|context_refiner|noise_refiner)\.\d+\.attention\.(to_[qkv]|to_out\.0)",
}
"""Names in diffusers' files that ComfyUI's maps hold, by family."""


def read_without_metadata(file):
    """{name: (scale, A, B)} as ComfyUI reads a LoRA file."""
    tensors = load_file(file)
    out = {}
    for key in tensors:
        if not key.endswith(".lora_B.weight"):
            continue
        name = key.removesuffix(".lora_B.weight")
        down = tensors[f"{name}.lora_A.weight"]
        alpha = tensors.get(f"{name}.alpha")
        out[name] = (1.0 if alpha is None else float(alpha) / down.shape[0], down, tensors[key])
    return out


def deltas(module):
    """{name: scale · B A} in fp64 of a denoiser's LoRA layers, from peft's own scaling, whatever it calls the LoRA."""
    out = {}
    for name, layer in module.named_modules():
        if isinstance(layer, Linear):
            (adapter,) = layer.scaling
            down = layer.lora_A[adapter].weight.double()
            up = layer.lora_B[adapter].weight.double()
            out[name] = layer.scaling[adapter] * up @ down
    return out


@pytest.mark.parametrize("family", dict.fromkeys(case.family for case in CASES))
@torch.no_grad()
def test_a_file_read_without_its_metadata_has_the_trained_strength(family, tmp_path):
    adapter = policy(case_of(family), encoders=False)  # rank 4, alpha 8
    adapter.save_lora(str(tmp_path))
    for place, module in zip((tmp_path, tmp_path / "transformer_2"), adapter.modules().values(), strict=False):
        found = read_without_metadata(place / "pytorch_lora_weights.safetensors")
        own = deltas(module)
        assert len(found) == len(own) > 0
        for name, (scale, down, up) in found.items():
            assert torch.equal(scale * up.double() @ down.double(), own[name.split(".", 1)[1]]), name
        if family in NAMES:
            assert not [name for name in found if not re.fullmatch(NAMES[family], name)]


@torch.no_grad()
def test_a_lora_of_others_keeps_its_strength_when_it_is_saved_again(tmp_path):
    """Files of other trainers may scale by alpha / √rank, and have another rank or alpha in single layers."""
    options = {"use_rslora": True, "rank_pattern": {"attn.to_q": 2}, "alpha_pattern": {"attn.to_k": 3}}
    targets = ["attn.to_q", "attn.to_k", "attn.to_v"]
    given = load(case_of("flux"), encoders=False)
    _inject(given.transformer, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    perturb(given)
    given.save_lora(str(tmp_path))
    again = load(case_of("flux"), encoders=False)
    again.load_lora(str(tmp_path))
    found = read_without_metadata(tmp_path / "pytorch_lora_weights.safetensors")
    kept = deltas(again.transformer)
    for name, delta in deltas(given.transformer).items():
        scale, down, up = found[f"transformer.{name}"]
        for other in (scale * up.double() @ down.double(), kept[name]):
            torch.testing.assert_close(other, delta, rtol=1e-6, atol=1e-6)


EXPORTED = {
    "krea2": r"diffusion_model\.blocks\.\d+\.(attn\.(w[qkvo]|gate)|mlp\.(gate|up|down))",
    "wan": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan22": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan_ti2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan_i2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.([qkvo]|[kv]_img)",
    "wan22_i2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.([qkvo]|[kv]_img)",
    "ltx2": r"diffusion_model\.transformer_blocks\.\d+\.(attn1|attn2|audio_to_video_attn)\.(to_[qkv]|to_out\.0)",
    "flux": FLUX,
    "flux3": (
        r"diffusion_model\.((txt|img)_mode_blocks\.\d+|content_mode_blocks\.image(_cond)?\.\d+|single_blocks\.\d+)"
        r"\.(q_proj|k_proj|v_proj|attn_out|mlp_in|mlp_out)"
    ),
}
"""Names in files written by `prefgrpo export`, as ComfyUI's maps hold them."""


@pytest.mark.parametrize("family", EXPORTED)
def test_the_exported_file_has_comfyuis_names(family, tmp_path):
    """diffusers, which reads such files too, must find the LoRA under its own names in it again."""
    targets = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj") if family == "wan_i2v" else None
    adapter = load(case_of(family), encoders=False)
    adapter.add_lora(4, 8.0, targets)
    perturb(adapter)
    run = tmp_path / "my_run"
    adapter.save_lora(str(run / "lora"))
    (run / "config.yaml").write_text(f"{{family: {family}, model: m, data: {{prompts: p.txt}}}}")
    assert main(["export", str(run), "--format", "comfy"]) == 0
    files = {f"my_run{end}": place for end, place in (("", "."), ("_transformer_2", "transformer_2"))}
    assert sorted(f.stem for f in (run / "comfy").iterdir()) == sorted(files)[: len(adapter.denoisers)]
    for file in (run / "comfy").iterdir():
        found = read_without_metadata(file)
        assert not [name for name in found if not re.fullmatch(EXPORTED[family], name)]
        assert all(scale == 1.0 for scale, _, _ in found.values())
        own = run / "lora" / files[file.stem]
        again, own = (
            type(adapter.pipe).lora_state_dict(str(p)) for p in (file, own / "pytorch_lora_weights.safetensors")
        )
        again, own = (dict(d) for d in (first(again), first(own)))
        assert again.keys() == own.keys() and all(torch.equal(again[k], own[k]) for k in own)


def first(value):
    """diffusers' lora_state_dict returns the tensors, or (tensors, network alphas)."""
    return value[0] if isinstance(value, tuple) else value


def test_what_cannot_be_exported(tmp_path, capsys):
    assert main(["export", str(tmp_path)]) == 2
    assert "is not a run: expected a folder with config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("{family: hunyuan_video, model: m, data: {prompts: p.txt}}")
    assert main(["export", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--format", "comfy"]) == 2
    assert "ComfyUI has no names for LoRAs of hunyuan_video" in capsys.readouterr().err


def test_a_run_continues_a_lora(trainer, tmp_path):
    """From a folder, from its file, and from a file without a header, all with alpha = rank; the KL compares with the
    model with that LoRA."""
    given = policy(case_of("flux"), encoders=False)  # rank 4, alpha 8
    given.save_lora(str(tmp_path))
    file = tmp_path / "pytorch_lora_weights.safetensors"
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(file), bare)
    for source in (tmp_path, file, bare):
        train = {"lora_from": str(source), "lora_rank": 8, "kl_coef": 0.1}
        one = trainer(source.name, train=train, eval={"every": 0})
        assert "LoRA rank 4 from" in one.notes[0]
        for (name, p), (_, q) in zip(one.adapter.trainable(), given.trainable(), strict=True):
            assert torch.equal(p, 2 * q if "lora_B" in name else q), name
    assert one.step(0, Clock())["policy/kl"] == 0


def test_what_cannot_be_continued(trainer, tmp_path):
    policy(case_of("sd3"), encoders=False).save_lora(str(tmp_path))
    for source, text in {
        str(tmp_path): "targets differ|size mismatch|cannot be continued",
        "nowhere/at/all": "a hub id 'owner/name' or 'owner/name/FILE.safetensors', got 'nowhere/at/all'",
    }.items():
        with pytest.raises(ConfigError, match=rf"train\.lora_from: .*{text}"):
            trainer(train={"lora_from": source}, eval={"every": 0})


# ---- files of other trainers


def bare(key):
    return key.removeprefix("transformer.")


def underscores(key):
    return "lora_unet_" + bare(key).replace(".", "_")


def alphas(layers, *values, dtype=torch.float32):
    """Alpha tensors of the first layers, or one value for all."""
    values = values * len(layers) if len(values) == 1 else values
    return {f"{layer}.alpha": torch.tensor(value, dtype=dtype) for layer, value in zip(layers, values, strict=False)}


def lower_rank(key, tensor):
    if "to_q" not in key:
        return tensor
    return (tensor[:2] if "lora_A" in key else tensor[:, :2]).contiguous()


FOREIGN = {
    "no header": lambda t, layers: t,
    "bf16": lambda t, layers: {k: v.bfloat16() for k, v in t.items()},
    "two ranks": lambda t, layers: {k: lower_rank(k, v) for k, v in t.items()},
    "alpha": lambda t, layers: t | alphas(layers, 8.0),
    "alpha in bf16": lambda t, layers: t | alphas(layers, 3.0, dtype=torch.bfloat16),
    "alpha 0": lambda t, layers: t | alphas(layers, 0.0),
    "alpha per layer": lambda t, layers: t | alphas(layers, *(1.0 + n for n in range(len(layers)))),
    "alpha of some": lambda t, layers: t | alphas(layers, 2.0, 3.0, 3.0),
    "alpha as int": lambda t, layers: t | alphas(layers, 8, dtype=torch.int64),
    "peft": lambda t, layers: {f"base_model.model.{bare(k)}": v for k, v in t.items()},
    "without prefix": lambda t, layers: {bare(k): v for k, v in t.items()},
    "ai-toolkit": lambda t, layers: {f"diffusion_model.{bare(k)}": v for k, v in t.items()},
    "kohya": lambda t, layers: {
        f"{underscores(k.rpartition('.lora_')[0])}.lora_{'down' if 'lora_A' in k else 'up'}.weight": v
        for k, v in t.items()
    } | {f"{underscores(layer)}.alpha": torch.tensor(2.0) for layer in layers},
    "of the text encoder": lambda t, layers: t | {"text_encoder.q.lora_A.weight": torch.ones(4, 4)},
    "DoRA": lambda t, layers: t | {f"{layer}.lora_magnitude_vector": torch.ones(4) for layer in layers},
    "LoHa": lambda t, layers: {f"{layer}.hada_w1_a": torch.ones(4, 4) for layer in layers},
    "LoKr": lambda t, layers: {f"{layer}.lokr_w1": torch.ones(4, 4) for layer in layers},
    "half a layer": lambda t, layers: {k: v for k, v in t.items() if k != f"{layers[0]}.lora_A.weight"},
    "another layer": lambda t, layers: t | {f"transformer.blox.lora_{k}.weight": torch.ones(4, 4) for k in "AB"},
}  # fmt: skip
SAME = ("no header", "peft", "without prefix", "ai-toolkit")
"""Names alone differ; stock pipelines do not read some of them."""
REFUSED = {
    "of the text encoder": "a LoRA of a text encoder (text_encoder.q", "DoRA": "a DoRA", "LoHa": "a LoHa",
    "LoKr": "a LoKr", "half a layer": "their targets differ",
    "another layer": "has tensors of no layer of the model: transformer.blox.lora_A.weight",
}  # fmt: skip


def stock(adapter, file):
    """What the stock pipeline makes of a file; {} if it refuses it or finds nothing that it knows."""
    try:
        adapter.pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    except (ValueError, KeyError):
        return {}
    return deltas(adapter.transformer)


ALONE = ("hunyuan_video_15",)
"""Its stock pipeline reads no LoRA."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name != "flux"))
        for name in dict.fromkeys(case.family for case in CASES)
    ],
)
@torch.no_grad()
def test_a_foreign_file_has_the_strength_of_the_stock_pipeline_or_is_refused(family, tmp_path):
    case = case_of(family)
    policy(case, encoders=False).save_lora(str(tmp_path))
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    layers = sorted({key.rpartition(".lora_")[0] for key in tensors})
    truth = {bare(n): tensors[f"{n}.lora_B.weight"].double() @ tensors[f"{n}.lora_A.weight"].double() for n in layers}
    base = load(case, encoders=False)
    read = set()
    for kind, change in FOREIGN.items():
        changed = change(tensors, layers)
        file = tmp_path / kind / "pytorch_lora_weights.safetensors"
        for expert in ("", "transformer_2"):
            (file.parent / expert).mkdir(parents=True, exist_ok=True)
            save_file(changed, file.parent / expert / file.name)
        one = copy.deepcopy(base)
        other = copy.deepcopy(base)
        try:
            one.load_lora(str(file.parent))
        except ValueError as error:
            assert REFUSED.get(kind, "") in str(error), kind
            whole = kind not in REFUSED and family not in ALONE and len(stock(other, file)) == len(layers)
            assert not whole, f"the stock pipeline reads {kind}"
            continue
        read.add(kind)
        got = deltas(one.transformer)
        want = truth if kind in SAME else got if family in ALONE else stock(other, file)
        assert got.keys() == want.keys(), kind
        for name, delta in got.items():
            torch.testing.assert_close(delta, want[name], rtol=1e-6, atol=1e-9, msg=lambda m, kind=kind: f"{kind}: {m}")
        assert all(p.dtype == torch.float32 for _, p in one.trainable())
    assert read >= {*SAME, "bf16", "two ranks"}
    assert not read & set(REFUSED)
    assert family != "flux" or read >= {kind for kind in FOREIGN if "alpha" in kind} - {"alpha as int"}


# ---- spelling × alpha × header

PREFIXES = {"diffusers": "transformer.", "bare": "", "ai-toolkit": "diffusion_model.", "peft": "base_model.model."}
ENDS = {"A/B": ("lora_A.weight", "lora_B.weight"), "down/up": ("lora_down.weight", "lora_up.weight")}
HEADER = {"r": 4, "lora_alpha": 12, "rank_pattern": {}, "alpha_pattern": {}}
"""Scale 3; the alpha tensors below make a half."""


def spelled(tensors, prefix, ends, flat=False):
    """{name: tensor} of a file with diffusers' names, in other words; flat: kohya's names of layers."""
    out = {}
    for key, tensor in tensors.items():
        layer, _, kind = bare(key).rpartition(".lora_")
        out[f"{prefix}{layer.replace('.', '_') if flat else layer}.{ends[kind == 'B.weight']}"] = tensor
    return out


SPELLINGS = {
    **{f"{p}, {e}": (PREFIXES[p], ENDS[e]) for p in PREFIXES for e in ENDS},
    "bare, default": ("", ("lora_A.default.weight", "lora_B.default.weight")),
    "kohya": ("lora_unet_", ENDS["down/up"], True),
}
LIKE_QWEN_IMAGE = {
    "diffusers, A/B": "11 33 xx xx",
    "diffusers, down/up": "xx xx xx xx",
    "bare, A/B": ".1 .3 hh pp",
    "bare, down/up": ".x .x hh pp",
    "ai-toolkit, A/B": "11 33 hh pp",
    "ai-toolkit, down/up": "11 33 hh pp",
    "peft, A/B": ".1 .3 xx xx",
    "peft, down/up": ".x .x xx xx",
    "bare, default": "11 33 hh pp",
    "kohya": "11 33 hh pp",
}
READ = {
    "z_image": LIKE_QWEN_IMAGE,
    "qwen_image": LIKE_QWEN_IMAGE,
    "flux": {
        "diffusers, A/B": "11 33 hh xx",
        "diffusers, down/up": "11 33 1x 3x",
        "bare, A/B": ".1 .3 .h xx",
        "bare, down/up": "x1 x3 xx xx",
        "ai-toolkit, A/B": ".1 .3 .h xx",
        "ai-toolkit, down/up": "x1 x3 xx xx",
        "peft, A/B": "x1 x3 xh xx",
        "peft, down/up": "x1 x3 xx xx",
        "bare, default": ".x .x .x xx",
        "kohya": "xx xx xx xx",
    },
    "flux2": {
        "diffusers, A/B": "11 33 xx xx",
        "diffusers, down/up": ".x .x .x .x",
        "bare, A/B": ".1 .3 xx xx",
        "bare, down/up": ".x .x .x .x",
        "ai-toolkit, A/B": "11 33 xx xx",
        "ai-toolkit, down/up": ".x .x .x .x",
        "peft, A/B": "11 33 xx xx",
        "peft, down/up": ".x .x .x .x",
        "bare, default": ".x .x xx xx",
        "kohya": ".x .x .x .x",
    },
    "sd3": {
        "diffusers, A/B": "11 33 xx xx",
        "diffusers, down/up": "xx xx xx xx",
        "bare, A/B": ".1 .3 xx xx",
        "bare, down/up": ".x .x xx xx",
        "ai-toolkit, A/B": ".1 .3 xx xx",
        "ai-toolkit, down/up": ".x .x xx xx",
        "peft, A/B": ".1 .3 xx xx",
        "peft, down/up": ".x .x xx xx",
        "bare, default": ".x .x xx xx",
        "kohya": ".x .x .x .x",
    },
    "wan": {
        "diffusers, A/B": "11 33 xx xx",
        "diffusers, down/up": "xx xx xx xx",
        "bare, A/B": ".1 .3 xx xx",
        "bare, down/up": ".x .x xx xx",
        "ai-toolkit, A/B": "x1 x3 xx xx",
        "ai-toolkit, down/up": "xx xx xx xx",
        "peft, A/B": ".1 .3 xx xx",
        "peft, down/up": ".x .x xx xx",
        "bare, default": ".x .x xx xx",
        "kohya": "xx xx xx xx",
    },
    "ltx2": {
        "diffusers, A/B": "11 33 xx xx",
        "diffusers, down/up": "xx xx xx xx",
        "bare, A/B": ".1 .3 xx xx",
        "bare, down/up": ".x .x xx xx",
        "ai-toolkit, A/B": "11 33 xx xx",
        "ai-toolkit, down/up": "xx xx xx xx",
        "peft, A/B": ".1 .3 xx xx",
        "peft, down/up": ".x .x xx xx",
        "bare, default": ".x .x xx xx",
        "kohya": ".x .x .x .x",
    },
}
"""Family → spelling → what the stock pipeline (diffusers 0.42.1) and ours make of a file: with no alpha or header, with
a header, with alphas, with both. 1, 3, h (½), p (3 · ½): its strength; ".": no layer and no error; x: refused."""
FAULTY = ("z_image", "qwen_image")


def strength(layers, truth):
    """A letter: "." no layer, "?" neither strength, otherwise the factor that all layers have."""
    if not layers:
        return "."
    for letter, factor in {"1": 1.0, "3": 3.0, "h": 0.5, "p": 1.5}.items():
        same = layers.keys() == truth.keys()
        if same and all(torch.allclose(layers[n], factor * truth[n], rtol=1e-5, atol=1e-9) for n in truth):
            return letter
    return "?"


def attempt(read, adapter, kept):
    """The LoRA layers that `read` makes of fresh denoisers, or None if it raises or leaves them without weights."""
    for name, module in kept.items():
        setattr(adapter.pipe, name, copy.deepcopy(module))
    try:
        read()
    except Exception:  # noqa: BLE001  (diffusers raises whatever it comes upon)
        return None
    layers = deltas(adapter.pipe.transformer)
    return None if any(delta.is_meta for delta in layers.values()) else layers


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.full] * (f not in FAULTY)) for f in READ])
@torch.no_grad()
def test_spelling_alpha_and_header(family, tmp_path):
    """What the stock pipeline reads is as strong here or refused; what it passes over in silence is read or refused."""
    case = case_of(family)
    adapter = load(case, encoders=False)
    kept = {name: copy.deepcopy(module) for name, module in adapter.modules().items()}
    adapter.add_lora(4, 4.0, adapter.lora_targets[:1])
    perturb(adapter).save_lora(str(tmp_path))
    truth = deltas(adapter.pipe.transformer)
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    header = {f"transformer.{k}": v for k, v in HEADER.items()} | {"transformer.target_modules": list(truth)}
    file = tmp_path / "changed" / "pytorch_lora_weights.safetensors"
    file.parent.mkdir()
    found = {}
    for spelling, how in SPELLINGS.items():
        letters = []
        for with_alpha, with_header in itertools.product((False, True), repeat=2):
            changed = spelled(tensors, *how)
            if with_alpha:
                changed |= {f"{name.partition('.lora_')[0]}.alpha": torch.tensor(2.0) for name in changed}
            save_file(changed, file, {"lora_adapter_metadata": json.dumps(header)} if with_header else None)
            by_stock = attempt(
                lambda: adapter.pipe.load_lora_weights(str(file.parent), weight_name=file.name), adapter, kept
            )
            by_us = attempt(lambda: adapter.load_lora(str(file.parent)), adapter, kept)
            letters.append("".join("x" if each is None else strength(each, truth) for each in (by_stock, by_us)))
        found[spelling] = " ".join(letters)
    for spelling, letters in found.items():
        for stock_letter, our_letter in letters.split():
            alike = our_letter == stock_letter or our_letter == "x"
            assert our_letter not in ".?" and (alike or stock_letter in ".x"), (spelling, letters)
    assert found == READ[family]


def test_headers_of_other_versions_of_peft_and_its_own_folders(tmp_path):
    """Ours has nothing that an older peft does not know; from a newer one, unknown options matter if they are set."""
    case = case_of("flux")
    policy(case, encoders=False).save_lora(str(tmp_path))
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    known = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules")
    assert sorted(header) == sorted(f"transformer.{name}" for name in known)
    for value, said in ((None, ""), ({"rank": 3}, "needs a newer peft: its header has from_the_future")):
        newer = json.dumps(header | {"transformer.from_the_future": value})
        save_file(tensors, tmp_path / "newer.safetensors", {"lora_adapter_metadata": newer})
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            load(case, encoders=False).load_lora(str(tmp_path / "newer.safetensors"))
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file({f"base_model.model.{bare(k)}": v for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "inference_mode": True, "r": 4, "lora_alpha": 8, "target_modules": ["to_q"]}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    one = load(case, encoders=False)
    one.load_lora(str(folder))
    assert {layer.scaling["default"] for layer in one.transformer.modules() if isinstance(layer, Linear)} == {2.0}
    assert len(one.trainable()) == len(tensors)
    (folder / "adapter_model.safetensors").write_bytes(file.read_bytes()[:-100])
    for place, said in ((folder, "is no complete safetensors file"), (tmp_path / "none", "expected pytorch_lora_weig")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            load(case, encoders=False).load_lora(str(place))
