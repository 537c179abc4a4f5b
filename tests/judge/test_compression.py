"""Judges behind a proxy that compresses every reply, although no request accepts it (what unpacks to too much is one of
the faults of tests/judge/test_http.py).

The encodings are those of the standard library and of the packages that aiohttp names for the others.
"""

import gzip
import sys
import zlib

import brotli
import pytest
from aiohttp import web
from servers import JudgeServer

from tests.judge.test_http import ask, judge, missing

if sys.version_info >= (3, 14):  # the other part can go when Python 3.14 is the floor, as can backports.zstd
    from compression import zstd
else:
    from backports import zstd

WRITE = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstd.compress}


class Compressing(JudgeServer):
    """Compresses every reply, of its checks and refusals too."""

    encoding = "gzip"
    write = staticmethod(gzip.compress)

    def add_routes(self, app):
        @web.middleware
        async def compress(request, handler):
            reply = await handler(request)
            body = self.write(reply.body or b"")
            headers = {"Content-Encoding": self.encoding, "Content-Type": "application/json"}
            return web.Response(body=body, status=reply.status, headers=headers)

        app.middlewares.append(compress)


@pytest.mark.parametrize("encoding", WRITE)
def test_a_judge_behind_a_proxy_that_compresses_is_read(encoding):
    with Compressing() as server:
        server.encoding = encoding
        server.write = WRITE[encoding]
        dark, bright = ask(judge(server.url, timeout_s=5.0))
        assert dark.value < 0.1 and bright.value > 0.9
        server.fault = "400"
        missing(ask(judge(server.url, timeout_s=5.0)), "At most 1 image")


def test_what_cannot_be_unpacked_is_missing_with_the_reason():
    with Compressing() as server:
        server.write = lambda body: b"\x7f" + body
        missing(ask(judge(server.url, timeout_s=1.0)), "Can not decode content-encoding: gzip")
