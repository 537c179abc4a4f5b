"""`python -m benchmarks.echo_server`: a judge server with immediate answers, faster than its clients.

It reads a request and sends a fixed chat completion. With `--count` it also sums the bytes of the images, for
GET /counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from contextlib import suppress

_LABELS = [{"token": "1", "logprob": -0.2}, {"token": "2", "logprob": -1.7}]
_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "1"},
    "logprobs": {"content": [_LABELS[0] | {"top_logprobs": _LABELS}]},
    "finish_reason": "length",
}
MODELS = json.dumps({"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "vllm"}]}).encode()
ANSWER = json.dumps({"id": "0", "object": "chat.completion", "model": "echo", "choices": [_CHOICE]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Judge:
    """The server, and what it counted."""

    def __init__(self, count: bool) -> None:
        self.count = count
        self.image_bytes = 0

    def reply(self, path: bytes, body: bytes) -> bytes:
        """The JSON that answers a request."""
        if path == b"/v1/models":
            return MODELS
        if path == b"/version":
            return b'{"version": "0.32.0"}'
        if path == b"/counts":
            return json.dumps({"image_bytes": self.image_bytes}).encode()
        if not body:
            return b"{}"
        if self.count:
            self.image_bytes += sum(map(len, re.findall(rb';base64,([^"]*)"', body)))
        return ANSWER

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """HTTP/1.1 with Content-Length and keep-alive, one request at a time, until the client closes."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                answer = self.reply(head.split(b" ")[1], body)
                writer.write(HEAD % len(answer) + answer)
                await writer.drain()
        writer.close()


async def serve(port: int, count: bool) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(Judge(count).connection, "127.0.0.1", port, limit=1 << 22)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.count))
