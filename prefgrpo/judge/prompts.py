"""`prefgrpo judge prompts`: fetches the questions that fine-tuned judges were trained on (published.py).

It downloads a file of a fixed commit, or takes it from a checkout, verifies its hash, and writes a template into the
user's cache.
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from functools import cache
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from prefgrpo.config.recipe import did_you_mean
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.published import PUBLISHED, question_of, template_file
from prefgrpo.judge.template import shipped_templates


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = (),
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
) -> int:
    """Fetch the questions that fine-tuned judges were trained on.

    Args:
        names: Templates, e.g. think flex; empty: list them. `all` fetches every one.
        source: A checkout's file or folder to take the text from, instead of a download.
    """
    if not names:
        for name, row in PUBLISHED.items():
            state = "fetched" if template_file(name).is_file() else "not fetched"
            print(f"{name:26} {state:12} {row.source[0]} {row.source[2]}")
        return 0
    videos = [f"{name}_video" for name in names if f"{name}_video" in PUBLISHED]
    for name in PUBLISHED if names == ("all",) else dict.fromkeys([*names, *videos]):
        print(f"{name}: {fetch(name, source)}")
        print(f"  from {PUBLISHED[name].source[0]}; licence: {PUBLISHED[name].source[4]}")
    return 0


def fetch(name: str, source: Path | None = None) -> Path:
    """Write the template with the published question; its path. JudgeError if the file is not the expected one.

    source: the publisher's file, or a folder that contains it; None: download it.
    """
    if name not in PUBLISHED:
        raise JudgeError(
            f"no published question for '{name}'{did_you_mean(name, PUBLISHED)}; there are: {', '.join(PUBLISHED)}"
        )
    row = PUBLISHED[name]
    repository, commit, path, expected, licence = row.source
    if source is None:
        files = [_download(f"https://raw.githubusercontent.com/{repository}/{commit}/{path}")]
    else:
        places = [source] if source.is_file() else source.rglob(Path(path).name)
        files = [place.read_bytes() for place in places]
    code = next((raw for raw in files if hashlib.sha256(raw).hexdigest() == expected), None)
    if code is None:
        raise JudgeError(
            f"{source or 'the download'}: expected {path} of {repository} at commit {commit} (SHA-256 {expected}), "
            f"found {len(files)} file(s) of that name, all with other contents; check out that commit, or leave "
            "--from away to download the file"
        )
    values = dict(shipped_templates()[name])
    values["user"] = "".join(f"{{{medium}}}" for medium in row.media) + question_of(code.decode("utf-8"), row)
    file = template_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    note = f"# {path} of {repository} at {commit}; licence: {licence}\n"
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(note + yaml.safe_dump(values, allow_unicode=True, sort_keys=False), encoding="utf-8")
    partial.replace(file)
    return file


@cache
def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as reply:
            return bytes(reply.read(1 << 22))
    except OSError as error:
        raise JudgeError(
            f"cannot download {url} ({error}): clone the repository and give the folder, --from CHECKOUT"
        ) from error
