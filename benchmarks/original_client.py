"""The judge client of the original Pref-GRPO, reimplemented from a description of its behaviour.

Reproduced: every call makes a new client and a new pool of 16 threads (fewer for fewer pairs) with one
`requests.Session` per thread, so that no connection or encoding outlives the call; one blocking request per pair, each
pair once, the earlier member first; both full images in every request, as base64 of JPEG of quality 95 in JSON;
retries with exponential backoff on any failure. Images come from files, as its trainers write them:

- `paths` (its "think" reward): worker threads read, encode and cache per path, for this call;
- `pairs` (its "flex" reward): the calling thread encodes both images of every pair before the first request.

Omitted, in its favour: writing the PNG files, the log of all requests with their images, the progress bar. The
question, its order and the sampling are ours, so that only the client differs.
"""

from __future__ import annotations

import base64
import copy
import io
import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from PIL import Image

WORKERS, RETRIES, TIMEOUT_S, LONGEST_PAUSE_S = 16, 10, 160.0, 10.0


def encode(path: Path) -> str:
    """A file's image as a data URL."""
    buffer = io.BytesIO()
    Image.open(path).convert("RGB").save(buffer, format="JPEG", quality=95)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def filled(skeleton: dict[str, Any], urls: Sequence[str]) -> dict[str, Any]:
    """A chat request like `skeleton`, with these images."""
    body = copy.deepcopy(skeleton)
    parts = [p for m in body["messages"] if isinstance(m["content"], list) for p in m["content"]]
    pictures = [part for part in parts if part["type"] == "image_url"]
    for part, url in zip(pictures, urls, strict=True):
        part["image_url"] = {"url": url}
        part.pop("uuid", None)
    return body


class Client:
    """The client; a new one is created for every call."""

    def __init__(self, url: str, workers: int) -> None:
        self.url, self.workers = f"{url}/v1/chat/completions", workers
        self._local = threading.local()
        self._encoded: dict[Path, str] = {}

    def session(self) -> requests.Session:
        """This thread's session."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            adapter = requests.adapters.HTTPAdapter(pool_connections=self.workers, pool_maxsize=self.workers)
            self._local.session.mount("http://", adapter)
        return self._local.session

    def encoded(self, path: Path) -> str:
        """The image's data URL, cached for this client's lifetime."""
        if path not in self._encoded:
            self._encoded[path] = encode(path)
        return self._encoded[path]

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Post until it succeeds."""
        for attempt in range(RETRIES):
            try:
                reply = self.session().post(self.url, json=body, timeout=TIMEOUT_S + 5.0 * attempt)
                reply.raise_for_status()
                return reply.json()
            except requests.RequestException:
                if attempt == RETRIES - 1:
                    raise
                time.sleep(min(2.0**attempt + random.random(), LONGEST_PAUSE_S))
        raise AssertionError("unreachable")


def judge_group(url: str, skeleton: dict[str, Any], files: Sequence[Path], style: str) -> list[dict[str, Any]]:
    """The answers to every pair once. style: `paths` or `pairs`."""
    pairs = list(itertools.combinations(files, 2))
    workers = min(WORKERS, len(pairs))
    client = Client(url, workers)
    ready = [(encode(a), encode(b)) for a, b in pairs] if style == "pairs" else None

    def work(k: int) -> dict[str, Any]:
        a, b = pairs[k]
        urls = ready[k] if ready else (client.encoded(a), client.encoded(b))
        return client.ask(filled(skeleton, urls))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(len(pairs))))
