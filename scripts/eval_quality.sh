#!/usr/bin/env bash
# Usage: GPU_NUM=8 scripts/eval_quality.sh --image_dir DIR --prompt_csv FILE [--reward_spec "clip,aesthetic,pickscore"]
#            [--api_url URL] [--output_json FILE] …   (--help lists all)
# Scores a folder of images named INDEX_K.png, with the flags and JSON format of Pref-GRPO's tools/eval_quality.sh.
set -euo pipefail
script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/eval_quality.py
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc_per_node "${GPU_NUM:-1}" "$script" "$@"
