"""`python -m benchmarks.echo_server`: a judge server with immediate answers, faster than its clients.

It reads a request and sends a fixed chat completion. It uses only the length of the body; with `--count` it also sums
the bytes of the images, for GET /counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

_LABELS = [{"token": "1", "logprob": -0.2}, {"token": "2", "logprob": -1.7}]
_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "1"},
    "logprobs": {"content": [_LABELS[0] | {"top_logprobs": _LABELS}]},
    "finish_reason": "length",
}
MODELS = json.dumps({"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "vllm"}]}).encode()
ANSWER = json.dumps({"id": "0", "object": "chat.completion", "model": "echo", "choices": [_CHOICE]}).encode()


def image_bytes(body: bytes) -> int:
    """Bytes of base64 in the data URLs of a request."""
    total, at = 0, body.find(b";base64,")
    while at >= 0:
        end = body.find(b'"', at)
        total += end - at - len(b";base64,")
        at = body.find(b";base64,", end)
    return total


class Judge:
    """State shared by all connections."""

    def __init__(self, count: bool) -> None:
        self.count = count
        self.requests = self.images = 0

    def reply(self, path: bytes, body: bytes) -> bytes:
        """The JSON that answers a request."""
        if path == b"/v1/models":
            return MODELS
        if path == b"/version":
            return b'{"version": "0.32.0"}'
        if path == b"/counts":
            return json.dumps({"requests": self.requests, "image_bytes": self.images}).encode()
        if not body:
            return b"{}"
        if self.count:
            self.images += image_bytes(body)
        self.requests += 1
        return ANSWER


class Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length and keep-alive, one request at a time."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.parts: list[bytes] = []
        self.size = self.needed = 0

    def connection_made(self, transport: Any) -> None:
        """Store the transport for responses."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Collect data until the request is complete."""
        self.parts.append(data)
        self.size += len(data)
        if not self.needed:
            head, found, _ = b"".join(self.parts).partition(b"\r\n\r\n")
            if not found:
                return
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            self.path, self.start = head.split(b" ")[1], len(head) + 4
            self.needed = self.start + length
        if self.size >= self.needed:
            whole = b"".join(self.parts)
            self.parts, self.size, body = [], 0, whole[self.start : self.needed]
            self.needed = 0
            self.send(self.judge.reply(self.path, body))

    def send(self, answer: bytes) -> None:
        """Write a response."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
        if not self.transport.is_closing():
            self.transport.write(head + answer)


async def serve(port: int, count: bool) -> None:
    """Serve until killed; prints the address."""
    judge = Judge(count)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(judge), "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--count", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.count))
