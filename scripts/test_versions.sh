#!/usr/bin/env bash
# Usage: scripts/test_versions.sh constraints | newest | floors [PYTEST ARGUMENTS]
# Runs the default tests in an environment of its own, which is gone afterwards, with the versions of constraints.txt, the
# newest that resolve together today, or the floors of pyproject.toml. ENVIRONMENT=DIR keeps it in DIR and uses it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
which=${1:?expected constraints, newest or floors} python=${PYTHON:-python3}
shift
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
venv=${ENVIRONMENT:-$tmp/venv}

case $which in
    constraints) cp constraints.txt "$tmp/versions.txt" ;;
    newest) touch "$tmp/versions.txt" ;;
    floors) "$python" scripts/floors.py >"$tmp/versions.txt" ;;
    *) echo "expected constraints, newest or floors, got $which" >&2; exit 2 ;;
esac
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
"$venv/bin/pip" install -q --no-compile -c "$tmp/versions.txt" -e ".[dev]"
"$venv/bin/python" scripts/torchvision_cpu.py
"$venv/bin/pip" list 2>/dev/null | grep -E "^(torch|torchvision|triton|numpy|diffusers|transformers|peft|accelerate) "
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full" "$@"
