"""LoRAs by hub id, from a hub on 127.0.0.1 that answers as huggingface.co does: a revision's listing, and its files.

The names of files are those of diffusers, of peft, and any other; a second expert's file is in a subfolder.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from huggingface_hub import constants, hf_api

from prefgrpo.models.weights import locate_lora

FILE = "pytorch_lora_weights.safetensors"
SECOND = f"transformer_2/{FILE}"
HUB = {
    "org/plain": {"main": {FILE: "new"}, "v1": {FILE: "old"}, "refs/pr/3": {FILE: "proposed"}},
    "org/peft": {"main": {"adapter_model.safetensors": "a", "adapter_config.json": "{}", "optimizer.pt": "o"}},
    "org/experts": {"main": {FILE: "high", SECOND: "low", f"checkpoint-500/{FILE}": "c"}},
    "org/others": {"main": {"my style [v2].safetensors": "b", "sub/low_noise.safetensors": "l", "README.md": "r"}},
    "org/empty": {"main": {"README.md": "r"}},
}
"""Repository → revision → file → content."""


class Hub(BaseHTTPRequestHandler):
    """Three routes of the hub: /api/models/REPO/revision/REV, /api/models/REPO/tree/REV and /REPO/resolve/REV/FILE."""

    def do_GET(self):
        owner, name, kind, *rest = (
            unquote(self.path.partition("?")[0]).removeprefix("/api/models/").lstrip("/").split("/")
        )
        repository = HUB.get(f"{owner}/{name}", {})
        by_commit = {commit(revision): files for revision, files in repository.items()}
        if kind == "resolve":
            self.asked.append("/".join(rest[1:]))
            return self.answer(by_commit[rest[0]][self.asked[-1]].encode(), rest[0])
        revision = "/".join(rest)
        files = (repository | by_commit).get(revision)
        if files is None:
            return self.missing(repository)
        if kind == "tree":
            listing = [{"type": "file", "path": file, "size": len(text), "oid": file} for file, text in files.items()]
        else:
            siblings = [{"rfilename": file} for file in files]
            listing = {"id": f"{owner}/{name}", "sha": commit(revision), "siblings": siblings}
        return self.answer(json.dumps(listing).encode())

    do_HEAD = do_GET

    def answer(self, body, sha=""):
        self.send_response(200)
        etag = hashlib.sha256(body).hexdigest()
        for key, value in {"Content-Length": len(body), "ETag": f'"{etag}"', "X-Repo-Commit": sha}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def missing(self, repository):
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound" if repository else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def commit(revision):
    return hashlib.sha1(revision.encode()).hexdigest()


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The files that were asked for, with an empty cache."""
    names = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Hub,), {"asked": names}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {"HF_HUB_OFFLINE": False, "ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path)}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    yield names
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("source", "experts", "files"),
    [
        ("org/plain", (), {FILE: "new"}),
        ("org/plain@v1", (), {FILE: "old"}),
        ("org/plain@refs/pr/3", (), {FILE: "proposed"}),
        ("org/peft", (), {"adapter_model.safetensors": "a", "adapter_config.json": "{}"}),
        ("org/experts", ("transformer_2",), {FILE: "high", SECOND: "low"}),
        ("org/experts", (), {FILE: "high"}),
        ("org/others/my style [v2].safetensors", (), {"my style [v2].safetensors": "b"}),
        ("org/others/sub/low_noise.safetensors@main", (), {"sub/low_noise.safetensors": "l"}),
        (f"org/plain/{FILE}@v1", (), {FILE: "old"}),
    ],
)
def test_what_a_hub_id_downloads(asked, monkeypatch, source, experts, files):
    """These files and no others; offline from the cache."""
    place = locate_lora(source, experts)
    named = source.count("/") > 1 and source.partition("@")[0].endswith(".safetensors")
    folder = place.parents[len(next(iter(files)).split("/")) - 1] if named else place
    found = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert found == files
    assert set(asked) == set(files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked.clear()
    assert locate_lora(source, experts) == place and not asked
    assert not named or place == folder / next(iter(files))


@pytest.mark.parametrize(
    ("source", "said"),
    {
        "org/others": r"'org/others' has no pytorch_lora_weights.safetensors or adapter_model.safetensors; it has "
        r"org/others/my style \[v2\].safetensors, org/others/sub/low_noise.safetensors",
        "org/others/mine.safetensors": r"has no mine.safetensors; it has org/others/my style",
        "org/empty": r"has no pytorch_lora_weights.safetensors or adapter_model.safetensors$",
        "org/nobody": "404|not found|Not Found",
        "org/plain@v9": "v9|404|not found",
        "org/plain/checkpoint-500": "expected a folder, a file or a hub id 'owner/name' or 'owner/name/FILE.safeten",
    }.items(),
)
def test_what_the_hub_does_not_have(asked, source, said):
    with pytest.raises(OSError, match=said):
        locate_lora(source)
