#!/usr/bin/env bash
# Usage: GPU_NUM=8 [VBENCH=CHECKOUT VBENCH_PYTHON=VENV/bin/python] scripts/eval_vbench.sh RUN|MODEL INFO.json OUT [option …]
# Generates VBench's clips for every prompt of INFO.json (VBench_full_info.json); resumable. Takes the options of `prefgrpo
# evaluate`. Pref-GRPO's settings: --rollout.frames 33 --rollout.steps 30 --seed 42 --eval.height 480 --eval.width 832.
# With VBENCH (a checkout of Vchitect/VBench) and VBENCH_PYTHON (the Python of its separate environment), the clips are also
# scored with VBench, one dimension at a time, and the table is written to OUT.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
target=$1 info=$(realpath "$2") out=$3
shift 3
python=${PYTHON:-python}
"$python" -m torch.distributed.run --nproc_per_node "${GPU_NUM:-1}" -m prefgrpo evaluate "$target" --suite vbench \
    --prompts "$info" --out "$out" "$@"
[ -n "${VBENCH:-}" ] || exit 0

vbench_python=$(realpath -s "${VBENCH_PYTHON:?expected the path to the Python of an environment with VBench}") out=$(realpath "$out")
dimensions=$("$python" -c "from prefgrpo.suites.vbench import QUALITY, SEMANTIC; print(*QUALITY, *SEMANTIC)")
cd "$VBENCH"
for dimension in $dimensions; do
    scores=$out/scores/$dimension videos=$out/videos
    compgen -G "$scores/*_eval_results.json" >/dev/null && continue
    if [ "$dimension" = temporal_flickering ]; then # five clips without motion out of 25
        "$vbench_python" static_filter.py --videos_path "$videos" --result_path "$out/static"
        videos=$out/static/filtered_videos
    fi
    "$vbench_python" evaluate.py --videos_path "$videos" --dimension "$dimension" --full_json_dir "$info" --output_path "$scores"
done
cd "$OLDPWD"
"$python" -m prefgrpo evaluate "$target" --suite vbench --prompts "$info" --results "$out/scores" --out "$out"
