#!/usr/bin/env bash
# Usage: scripts/install.sh VENV EXTRA
# Creates VENV if it does not exist and installs this checkout into it in editable mode, with one extra (train, rewards, docs
# or dev) and the versions of constraints.txt. Prints phases and large downloads; the full log is VENV/install.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 extra=$2 python=${PYTHON:-python3}

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "'$python' not found; set PYTHON=/path/to/python to a Python 3.10-3.14"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 15))' ||
    fail "$("$python" --version) is not supported: prefgrpo needs Python 3.10-3.14; choose one with PYTHON=python3.11"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "could not create $venv (on Debian and Ubuntu, install the package python3-venv first)"
fi

# The demos run on CPUs: nvcc would spend half a minute and more on kernels that they do not use.
if [[ $extra == train && -z ${PREFGRPO_CUDA:-} ]] && command -v nvcc >/dev/null && ! nvidia-smi -L >/dev/null 2>&1; then
    say "no GPU here: leaving out the CUDA kernels (PREFGRPO_CUDA=1 builds them; \`pip install -e .\` does it later)"
    export PREFGRPO_CUDA=0
fi

say "installing prefgrpo[$extra] into $venv"
log=$venv/install.log
started=$SECONDS
# --no-compile: compiling only what is later imported takes a third of the time.
# shellcheck disable=SC2086  # PIP_ARGS is a list of options
if ! PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -v --no-input --no-compile --progress-bar off \
    ${PIP_ARGS:-} -c constraints.txt -e ".[$extra]" 2>&1 | tee "$log" | awk '
        $1 == "Downloading" && $NF == "MB)" && substr($(NF - 1), 2) + 0 >= 5 && !seen[$2]++ { print "    " $2, $(NF - 1), $NF }
        /prefgrpo: building/ { sub(/^.*prefgrpo: /, ""); print "    " $0 }
        /^Installing collected packages/ { print "    unpacking " NF - 3 " packages" }
        /^ERROR/ { print }
        { fflush() }'; then
    tail -n 30 "$log" >&2
    fail "pip could not install prefgrpo[$extra]; the full log is $log"
fi
"$venv/bin/python" scripts/torchvision_cpu.py  # the default torchvision is a CUDA build, and torch may be a CPU build
say "done in $((SECONDS - started)) s"
touch "$venv/.installed-$extra"
[[ $extra != dev ]] || touch "$venv/.installed-train" "$venv/.installed-rewards" "$venv/.installed-docs"
