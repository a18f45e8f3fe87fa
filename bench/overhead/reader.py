"""`python -m bench.overhead.reader PORT STREAMS TOKENS`: chat streams of a server, read with as little work as can be.

Notes when each token arrived and prints the gaps as JSON. Two tokens that come together have none between them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

WARM = 20  # tokens of each stream that are not counted


class _Stream(asyncio.Protocol):
    """One HTTP/1.1 request and the events of its reply, with their start times."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self._tail + data
        self.times += [now] * data.count(b'"delta":{"content":')
        self._tail = data[-18:]
        if b"data: [DONE]" in data and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError(f"the server left after {len(self.times)} tokens"))


async def read(port: int, streams: int, tokens: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    opened: list[_Stream] = []
    for at in range(streams):
        body = json.dumps({
            "model": "default", "stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "messages": [{"role": "user", "content": f"{at} " * 20}],
        }).encode()  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        _, stream = await loop.create_connection(lambda request=request: _Stream(request), "127.0.0.1", port)  # type: ignore[misc]  # its own default
        opened.append(stream)
    cpu = time.process_time()
    await asyncio.gather(*(stream.done for stream in opened))
    last_begun = max(stream.times[WARM] for stream in opened)
    first_ended = min(stream.times[-1] for stream in opened)
    gaps, counted = [], 0
    for stream in opened:
        times = np.array([at for at in stream.times if last_begun <= at <= first_ended])  # while all of them run
        gaps.append(np.diff(times))
        counted += len(times)
    whole = np.concatenate(gaps)
    took = first_ended - last_begun
    all_of_it = max(stream.times[-1] for stream in opened) - min(stream.times[0] for stream in opened)
    return {
        "streams": streams,
        "seconds": took,
        "tokens_per_s": counted / took,
        "gap_s": {f"p{at}": float(np.percentile(whole, at)) for at in (50, 90, 99, 99.9, 100)},
        "client_cpu": (time.process_time() - cpu) / all_of_it,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read(*map(int, sys.argv[1:])))))
