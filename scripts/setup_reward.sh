#!/usr/bin/env bash
# setup_reward.sh [--dry-run] NAME VENV: a separate environment for one reward: deqa, geneval, hpsv3, imagereward or videoalign.
#
# Installs the packages of pyproject.toml's extra reward-deqa (the model's code needs transformers 4.36) or reward-server
# into VENV and puts this checkout on its path. For models that need the exact prompt text of their training, it also
# fetches that text: hpsv3's from its package, videoalign's from its repository (MIT licences; VIDEOALIGN=/path/to/VideoAlign
# uses a local checkout). Takes about 1 GB with a CPU build of torch. Running it again repairs an incomplete installation.
# PYTHON selects another Python (3.10 to 3.12); PIP_ARGS adds pip options. MMDET=1 adds MMDetection to geneval's environment,
# compiled from source (needs a C++ compiler, 10 to 25 minutes), to use the detector that GenEval was published with.
# --dry-run only prints what would be installed and where; --help prints this text.
set -euo pipefail

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
names="deqa geneval hpsv3 imagereward videoalign"
case ${1:-} in
-h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" && exit ;;
--dry-run) dry=yes && shift ;;
esac
[ $# -eq 2 ] || fail "usage: $0 [--dry-run] NAME VENV   (NAME: one of $names)"
name=$1 venv=$2 python=${PYTHON:-python3.11}
case " $names " in *" $name "*) ;; *) fail "unknown reward '$name'; expected one of $names" ;; esac
command -v "$python" >/dev/null || fail "expected $python; set PYTHON to a Python 3.10 to 3.12"
extra=reward-server && [ "$name" != deqa ] || extra=reward-deqa
packages=$("$python" - "$root/pyproject.toml" $extra <<'PY'
import sys
try:
    import tomllib
except ModuleNotFoundError:  # can go when Python 3.11 is the floor
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[2]])
PY
)
[ "$name" = deqa ] || packages="-c $root/constraints.txt $packages"
if [ -n "${dry:-}" ]; then
    echo "$python -m venv $venv; $venv/bin/python -m pip install ${PIP_ARGS:+$PIP_ARGS }$packages"
    exit
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# shellcheck disable=SC2086  # PIP_ARGS and packages are lists
pip() { "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check ${PIP_ARGS:-} "$@"; }
# shellcheck disable=SC2086
pip $packages
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$root" >"$site/prefgrpo.pth"

if [ "$name" = hpsv3 ]; then
    pip --no-deps hpsv3==1.0.0 # only for the prompt text that its model was trained with; it is never imported
elif [ "$name" = videoalign ]; then
    commit=219ab9db64c045e5181a2202d11f686439351292
    sum=8fb42f91fd7440a1c9a377e78f36d67da6132eb348f402eecbeb57e41f138ae9
    text="$venv/share/prefgrpo/videoalign_prompt_template.py"
    mkdir -p "$(dirname "$text")"
    if [ -n "${VIDEOALIGN:-}" ]; then
        cp "$VIDEOALIGN/prompt_template.py" "$text"
    else
        url="https://raw.githubusercontent.com/KwaiVGI/VideoAlign/$commit/prompt_template.py"
        "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$url" "$text" ||
            fail "could not fetch $url; clone KwaiVGI/VideoAlign and set VIDEOALIGN to its folder"
    fi
    echo "$sum  $text" | sha256sum --check --quiet || fail "$text is not the file of commit $commit"
fi

if [ "$name" = geneval ] && [ -n "${MMDET:-}" ]; then # mmcv has no wheels for current torch
    pip "setuptools<81" wheel ninja # build dependencies of mmcv, whose setup.py imports torch and pkg_resources
    PATH="$venv/bin:$PATH" MMCV_WITH_OPS=1 pip --no-build-isolation mmcv==2.1.0 mmdet==3.3.0 mmengine==0.10.7
    "$venv/bin/python" -c 'import mmcv.ops, mmdet.apis; print("MMDetection", mmdet.__version__)'
fi

(cd / && "$venv/bin/python" -c "
from prefgrpo.rewards import load_class
import prefgrpo.rewards.serve, torch, transformers
print('$name:', load_class('$name').__name__, 'with torch', torch.__version__, 'and transformers', transformers.__version__)")
echo "ready: $venv/bin/python -m prefgrpo.rewards.serve $name --port 8100"
