"""How far a VAE that decodes in bf16 is from itself in fp32, by family, at its tiny and its published configuration.

    python -m benchmarks.vae_precision                 # writes the table of docs/design.md
    python -m benchmarks.vae_precision MODEL/vae       # the weights of a model

Latents are normal noise. Random weights make images of any contrast, so differences are scaled to images whose standard
deviation is a quarter of the range from black to white; those of a model's weights are not scaled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from benchmarks.blocks import replace_block
from prefgrpo.tiny.pipelines import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "design.md"
CONTRAST = 0.25
"""Standard deviation of an image's values, of 0 … 1."""
FOUR: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "use_quant_conv": False,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_post_quant_conv": False,
}  # fmt: skip
TI2V: dict[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16,
}  # fmt: skip


class Case(NamedTuple):
    """A published VAE: where it differs from the defaults of its class in diffusers."""

    families: tuple[str, ...]
    config: dict[str, Any]
    channels: int = 16
    size: tuple[int, ...] = (16, 16)
    """Of the latents: [h, w], or [F', h, w]."""


CASES = (
    Case(("flux", "flux_kontext", "sd3", "z_image"), FOUR),
    Case(("flux2", "flux2_klein", "flux3"), {}, 32),
    Case(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "krea2"), {}, size=(1, 16, 16)),
    Case(("wan", "wan22", "wan_i2v", "wan22_i2v"), {}, size=(2, 12, 12)),
    Case(("wan_ti2v",), TI2V, 48, (2, 6, 6)),
    Case(("hunyuan_video",), {}, size=(2, 8, 8)),
    Case(("hunyuan_video_15",), {}, 32, (2, 6, 6)),
    Case(("ltx2",), {}, 128, (2, 4, 4)),
)


@torch.no_grad()
def difference(vae: Any, channels: int, size: tuple[int, ...], scaled: bool = True) -> tuple[float, float]:
    """(mean, largest) difference of bf16 to fp32, in 1/255 of the range from black to white."""
    latents = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(1))
    exact = vae.eval().decode(latents, return_dict=False)[0]
    rounded = vae.bfloat16().decode(latents.bfloat16(), return_dict=False)[0].float()
    gap = (rounded - exact).abs() * 255 * (CONTRAST / float(exact.std()) if scaled else 0.5)  # decoders span −1 … 1
    return float(gap.mean()), float(gap.max())


def row(case: Case) -> str:
    """A line of the table: tiny and published."""
    cells = []
    name, config = FAMILIES[case.families[0]][1]["vae"]
    for values in (config, case.config):
        torch.manual_seed(0)
        vae = getattr(diffusers, name)(**values)
        channels = next((values[key] for key in ("latent_channels", "z_dim") if key in values), case.channels)
        mean, largest = difference(vae, channels, case.size)
        cells.append(f"{mean:.2f}, {largest:.1f}")
    return f"| {', '.join(f'`{family}`' for family in case.families)} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table and write it to the docs, or a model's line."""
    diffusers.utils.logging.set_verbosity_error()
    if len(sys.argv) > 1:
        vae = diffusers.AutoModel.from_pretrained(sys.argv[1])
        channels = vae.config.get("latent_channels") or vae.config.z_dim
        video = any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
        mean, largest = difference(vae, channels, (2, 16, 16) if video else (16, 16), scaled=False)
        print(f"mean {mean:.2f}/255, largest {largest:.1f}/255")
        return
    lines = ["| family | tiny: mean, largest | published: mean, largest |", "|---|---|---|"]
    for case in CASES:
        lines.append(row(case))
        print(lines[-1], flush=True)
    replace_block(PAGE, "vae", lines)


if __name__ == "__main__":
    main()
