"""LoRA files in the hands of others: read without metadata, as ComfyUI, A1111 and most converters read them.

ComfyUI's rules (comfy/lora.py and comfy/weight_adapter/lora.py): a layer is `{name}.lora_A.weight` with
`{name}.lora_B.weight`; its scale is `{name}.alpha` / rank, or 1 without that tensor; the header is never read; a name
that is not in the model's map is skipped with a line in the log. The names below are those that its maps hold.
"""

import itertools
import json
import re
import shutil

import pytest
import torch
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from families import CASES, case_of, folder, load, perturb, policy, tiered
from peft import LoraConfig
from peft.tuners.lora import Linear
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prefgrpo import models
from prefgrpo.commands.cli import main
from prefgrpo.commands.export import renamed
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


def layers(module):
    """{name: (W, W + (alpha / rank) B A)} of a denoiser's LoRA layers, in fp64, from peft's own scaling."""
    out = {}
    for name, layer in module.named_modules():
        if isinstance(layer, Linear):
            base = layer.base_layer.weight.double()
            delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            out[name] = (base, base + layer.scaling["default"] * delta)
    return out


@pytest.mark.parametrize("family", dict.fromkeys(case.family for case in CASES))
@torch.no_grad()
def test_a_file_read_without_its_metadata_has_the_trained_strength(family, tmp_path):
    adapter = policy(case_of(family))  # rank 4, alpha 8
    adapter.save_lora(str(tmp_path))
    for place, module in zip((tmp_path, tmp_path / "transformer_2"), adapter.modules().values(), strict=False):
        found = read_without_metadata(place / "pytorch_lora_weights.safetensors")
        own = layers(module)
        assert len(found) == len(own) > 0
        for name, (scale, down, up) in found.items():
            base, merged = own[name.split(".", 1)[1]]
            assert torch.equal(base + scale * up.double() @ down.double(), merged), name
        if family in NAMES:
            assert not [name for name in found if not re.fullmatch(NAMES[family], name)]


@torch.no_grad()
def test_a_lora_of_others_keeps_its_strength_when_it_is_saved_again(tmp_path):
    """Files of other trainers may scale by alpha / √rank, and have another rank or alpha in single layers."""
    options = {"use_rslora": True, "rank_pattern": {"attn.to_q": 2}, "alpha_pattern": {"attn.to_k": 3}}
    targets = ["attn.to_q", "attn.to_k", "attn.to_v"]
    given = load(case_of("flux"))
    _inject(given.transformer, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    perturb(given)
    given.save_lora(str(tmp_path))
    again = load(case_of("flux"))
    again.load_lora(str(tmp_path))
    found = read_without_metadata(tmp_path / "pytorch_lora_weights.safetensors")
    kept = layers(again.transformer)
    for name, (base, merged) in layers(given.transformer).items():
        scale, down, up = found[f"transformer.{name}"]
        for other in (base + scale * up.double() @ down.double(), kept[name][1]):
            torch.testing.assert_close(other, merged, rtol=1e-6, atol=1e-6)


def write(folder, tensors, header=None, file="pytorch_lora_weights.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    text = {"lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in header.items()})} if header else {}
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"} | text
    )


def given_file(family, folder):
    """(tensors, header) of a LoRA file of the family; the first denoiser's."""
    policy(case_of(family)).save_lora(str(folder))
    file = folder / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    return load_file(file), {name.removeprefix("transformer."): value for name, value in header.items()}


def alphas(tensors, values):
    """An alpha tensor for layer k, of the k-th value in turn; none where that is None."""
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    of_layers = zip(layers, itertools.cycle(values), strict=False)
    return {f"{layer}.alpha": value for layer, value in of_layers if value is not None}


def fewer_ranks(tensors):
    """Two of four ranks in the layers to_q."""
    cut = {n: v[:2] if ".lora_A" in n else v[:, :2] for n, v in tensors.items() if "to_q" in n}
    return tensors | cut


def kohya(tensors):
    """kohya-ss's names of FLUX's output projections."""
    short = {"lora_A": "lora_down", "lora_B": "lora_up"}
    found = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"transformer\.transformer_blocks\.(\d+)\.attn\.to_out\.0\.(lora_[AB])\.weight", name):
            layer = f"lora_unet_double_blocks_{match[1]}_img_attn_proj"
            found |= {f"{layer}.{short[match[2]]}.weight": tensor, f"{layer}.alpha": torch.tensor(3.0)}
    return found


def comfy(family):
    names = models.family(family).comfy_names
    return lambda tensors: {renamed(name, names): tensor for name, tensor in tensors.items()}


def with_alpha(*values):
    return lambda tensors: tensors | alphas(tensors, values)


FORMS = {
    "bare": lambda tensors: tensors,
    "ranks": fewer_ranks,
    "alpha": with_alpha(torch.tensor(8.0)),
    "alphas": with_alpha(torch.tensor(8.0), torch.tensor(2.0), torch.tensor(1.0)),
    "some": with_alpha(torch.tensor(8.0), None),
    "some differ": with_alpha(torch.tensor(8.0), None, torch.tensor(2.0)),
    "bf16": with_alpha(torch.tensor(8.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16), None),
    "int": with_alpha(torch.tensor(8)),
    "zero": with_alpha(torch.tensor(0.0)),
    "ranks, alpha": lambda tensors: with_alpha(torch.tensor(8.0))(fewer_ranks(tensors)),
}
"""What other trainers write, from a file of diffusers' own names."""
NAMED = {("flux", "kohya"): kohya, ("wan", "comfy"): comfy("wan"), ("ltx2", "comfy"): comfy("ltx2")} | {
    (family, "diffusion_model"): lambda t: {n.replace("transformer.", "diffusion_model.", 1): v for n, v in t.items()}
    for family in ("qwen_image", "z_image", "ltx2")
}
"""(family, whose names) → the file with the names of another trainer."""


def deltas(module):
    """{layer: strength · B A} in fp64; a layer without any is left out."""
    out = {}
    for name, layer in module.named_modules():
        for key in getattr(layer, "scaling", ()):
            down, up = (getattr(layer, part)[key].weight.double() for part in ("lora_A", "lora_B"))
            product = float(layer.scaling[key]) * up @ down
            out |= {name: product} if product.any() else {}
    return out


def stock(case, place):
    """`deltas` of the stock pipeline with this file; None if it takes no such file."""
    pipe = case.pipe(folder(case.family))
    mixin = pipe if hasattr(pipe, "load_lora_weights") else HunyuanVideoLoraLoaderMixin
    try:
        if mixin is pipe:
            pipe.load_lora_weights(str(place), weight_name="pytorch_lora_weights.safetensors")
        else:
            state, header = mixin.lora_state_dict(str(place), return_lora_metadata=True)
            if not all("lora" in name for name in state):  # as its load_lora_weights does
                raise ValueError("Invalid LoRA checkpoint")
            mixin.load_lora_into_transformer(state, pipe.transformer, metadata=header)
    except (ValueError, TypeError):
        return None
    return deltas(pipe.transformer)


@pytest.mark.parametrize("case", tiered([case_of(family) for family in models.MODELS]))
@torch.no_grad()
def test_a_continued_lora_has_its_strength_in_the_stock_pipeline(case, tmp_path):
    """Or it is refused; what the stock pipeline loads in part, or not at all, is never half read."""
    family = case.family
    tensors, header = given_file(family, tmp_path / "given")
    forms = FORMS | {name: form for (of, name), form in NAMED.items() if of == family}
    forms["header"] = forms["header and alpha"] = None
    read = []
    for number, (name, form) in enumerate(forms.items()):
        place = tmp_path / str(number)
        options = {"r": 4, "lora_alpha": 6, "target_modules": header["target_modules"], "from_the_future": None}
        if form is None:
            both = name == "header and alpha"
            write(place, FORMS["alpha"](tensors) if both else tensors, options)
        else:
            write(place, form(tensors))
        expected = None if name == "header" else stock(case, place)  # it takes no unknown field
        adapter = load(case)
        for second in adapter.denoisers[1:]:
            shutil.copytree(place, place / second)
        try:
            adapter.load_lora(str(place))
        except ValueError as error:
            assert "expected" in str(error), (name, error)
            continue
        read.append(name)
        ours = deltas(adapter.transformer)
        if name == "header":
            plain = load(case)
            plain.load_lora(str(tmp_path / "0"))
            expected = {layer: 1.5 * delta for layer, delta in deltas(plain.transformer).items()}
        assert expected is not None and ours.keys() == expected.keys(), name
        for layer in ours:
            largest = float(expected[layer].abs().max())  # B times alpha / rank is rounded to fp32
            torch.testing.assert_close(
                ours[layer], expected[layer], rtol=0, atol=1e-6 * largest, msg=f"{name}: {layer}"
            )
    assert {"bare", "ranks", "header", *(name for of, name in NAMED if of == family)} <= set(read)
    if family in ("flux", "qwen_image", "z_image"):
        assert {"alpha", "alphas", "some", "bf16", "zero", "ranks, alpha"} <= set(read)


EXPORTED = {
    "wan": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan22": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan_ti2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.[qkvo]",
    "wan_i2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.([qkvo]|[kv]_img)",
    "wan22_i2v": r"diffusion_model\.blocks\.\d+\.(self|cross)_attn\.([qkvo]|[kv]_img)",
    "ltx2": r"diffusion_model\.transformer_blocks\.\d+\.(attn1|attn2|audio_to_video_attn)\.(to_[qkv]|to_out\.0)",
    "flux": FLUX,
}
"""Names in files written by `prefgrpo export`, as ComfyUI's maps hold them."""


@pytest.mark.parametrize("family", EXPORTED)
def test_the_exported_file_has_comfyuis_names(family, tmp_path):
    """diffusers, which reads such files too, must find the LoRA under its own names in it again."""
    targets = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj") if family == "wan_i2v" else None
    adapter = load(case_of(family))
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
    given = policy(case_of("flux"))  # rank 4, alpha 8
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


def test_peft_folders_are_continued(tmp_path):
    """As flow_grpo and verl-omni write them: names below base_model.model., rank and alpha in adapter_config.json."""
    tensors, header = given_file("sd3", tmp_path / "given")
    named = {name.replace("transformer.", "base_model.model.", 1): tensor for name, tensor in tensors.items()}
    write(tmp_path / "peft", named, file="adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": header["target_modules"]}
    later = {"inference_mode": True, "kasa_config": None, "peft_version": "9.0", "lora_dropout": 0.1}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(options | later))
    write(tmp_path / "named", named)
    write(tmp_path / "no_prefix", {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()})
    found = {}
    for name in ("given", "peft", "named", "no_prefix"):
        adapter = load(case_of("sd3"))
        adapter.load_lora(str(tmp_path / name))
        found[name] = deltas(adapter.transformer)
    for layer, delta in found["given"].items():
        assert torch.equal(found["peft"][layer], 2 * delta), layer
        assert torch.equal(found["named"][layer], delta) and torch.equal(found["no_prefix"][layer], delta), layer


def test_the_header_is_the_smallest(tmp_path):
    """Older versions of peft refuse a field that they do not know (kasa_config: peft 0.20)."""
    _, header = given_file("sd3", tmp_path)
    assert header.keys() == {"r", "lora_alpha", "target_modules"} and header["r"] == header["lora_alpha"] == 4


NO_LORA = {
    "lokr_w1": "LoKr", "hada_w1_a": "LoHa", "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA",
    "diff": "whole weights",
}  # fmt: skip


def test_what_is_no_plain_lora_is_refused_by_name(tmp_path):
    tensors, header = given_file("flux", tmp_path / "given")
    layer = next(iter(tensors)).partition(".lora_")[0]
    one = torch.ones(4, 4)
    cases = {kind: ({**tensors, f"{layer}.{end}": one}, None) for end, kind in NO_LORA.items()}
    cases["text encoder"] = ({**tensors, "text_encoder.layers.0.mlp.fc1.lora_A.weight": one}, None)
    cases["of a text encoder"] = ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": one}, None)
    cases["kasa_config"] = (tensors, header | {"kasa_config": {"beta": 1}})
    cases["use_dora"] = (tensors, header | {"use_dora": True})
    cases["pissa"] = (tensors, header | {"init_lora_weights": "pissa"})
    cases["expected names such as .*found unet.down.0.lora_A.weight"] = ({"unet.down.0.lora_A.weight": one}, None)
    cases["expected the \\d+ tensors of its .*targets"] = (tensors, header | {"target_modules": ["attn.to_q"]})
    for number, (text, (content, fields)) in enumerate(cases.items()):
        write(tmp_path / str(number), content, fields)
        with pytest.raises(ValueError, match=text):
            load(case_of("flux")).load_lora(str(tmp_path / str(number)))


def test_what_cannot_be_continued(trainer, tmp_path):
    policy(case_of("sd3")).save_lora(str(tmp_path))
    for source, text in {
        str(tmp_path): "cannot be continued: expected the \\d+ tensors of its .*targets",
        "nowhere/at/all": "expected a folder, a file or a hub id 'owner/name', got 'nowhere/at/all'",
    }.items():
        with pytest.raises(ConfigError, match=rf"train\.lora_from: .*{text}"):
            trainer(train={"lora_from": source}, eval={"every": 0})
    with pytest.raises(ConfigError, match=r"train\.lora_from: expected none, as train\.lora_rank is 0"):
        trainer(train={"lora_from": str(tmp_path), "lora_rank": 0})
