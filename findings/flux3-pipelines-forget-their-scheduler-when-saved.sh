#!/usr/bin/env bash
# Guess: save_pretrained of a pipeline keeps its scheduler, so that a folder samples with the shift that it was saved with.
# What happens: a modular pipeline saves those components alone that were declared to come from files. FLUX.3's scheduler
# and guider are made from the blocks' own defaults, so neither is in the folder, changed or not: after saving with
# shift 3 and guidance 2, loading gives shift 6.93 and guidance 3.5. No error, no warning.
# Versions: diffusers 0.42.1 (Flux3AutoBlocks). Source: save_pretrained goes over components with
# default_creation_method "from_pretrained"; scheduler and guider have "from_config".
# Hurt: whoever finetunes with another shift and publishes the folder, or reads the shift to train with from a folder.
# Seen 2026-11-29 (shift, guidance): fresh (6.93, 3.5), set (3.0, 2.0), saved and loaded (6.93, 3.5); the folder has
#   modular_model_index.json alone, without an entry of either
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/save.py" <<'PY'
import json, sys
from pathlib import Path
import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler, Flux3AutoBlocks, ModularPipeline

def values(pipe):
    return pipe.scheduler.config.shift, pipe.guider.guidance_scale

folder = Path(sys.argv[1], "saved")
pipe = Flux3AutoBlocks().init_pipeline()
seen = {"fresh": values(pipe)}
pipe.update_components(
    scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), guider=pipe.guider.new(guidance_scale=2.0)
)
seen["set"] = values(pipe)
pipe.save_pretrained(str(folder))
seen["loaded"] = values(ModularPipeline.from_pretrained(str(folder)))
index = json.loads((folder / "modular_model_index.json").read_text())
named = [name for name in index if not name.startswith("_")]
print("diffusers", diffusers.__version__, "(shift, guidance):", seen, "in the folder:", named)
assert seen == {"fresh": (6.93, 3.5), "set": (3.0, 2.0), "loaded": (6.93, 3.5)}
assert "transformer" in named and not {"scheduler", "guider"} & set(named)
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/save.py" "$tmp"
