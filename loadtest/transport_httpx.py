"""The same exchange through httpx: the yardstick for the bare transport, and the way through proxies."""

from __future__ import annotations

from time import perf_counter

import httpx

from loadtest.record import EventSplitter, RequestRecord
from loadtest.transport import TransportError


class HttpxTransport:
    """See `Transport`. url: http://host:port."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None)

    async def post(self, path: str, body: bytes, record: RequestRecord) -> None:
        record.sent_s = perf_counter()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", path, content=body, headers=headers) as answer:
                record.status = answer.status_code
                streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
                splitter = EventSplitter()
                async for piece in answer.aiter_raw():
                    now = perf_counter()
                    if streamed:
                        record.events += [(now, payload) for payload in splitter.feed(piece)]
                    else:
                        record.body += piece
        except httpx.ConnectError:
            raise TransportError("connect") from None
        except httpx.HTTPError:
            raise TransportError("connection lost") from None
        record.finished_s = perf_counter()

    async def get(self, path: str) -> tuple[int, bytes]:
        try:
            answer = await self._client.get(path)
        except httpx.HTTPError:
            raise TransportError("connect") from None
        return answer.status_code, answer.content

    async def close(self) -> None:
        await self._client.aclose()
