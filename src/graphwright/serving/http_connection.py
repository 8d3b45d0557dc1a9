"""Connection: one of HTTP, whose client can send neither endless headers nor none at all."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The most bytes of a request line and headers, or of what else is no body; and the pieces in which
# they are counted.
MOST_BYTES = 64 * 1024
_PIECE = 16 * 1024
# How long they may take.
HEADERS_S = 30.0
_TOO_LARGE = b'{"error":"The request line and headers are larger than 64 KiB."}'
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\n"
    b"content-length: %d\r\n"
    b"connection: close\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class Connection(HttpToolsProtocol):
    """Refuses headers that are too large or take too long, before the parser has them in memory.

    Trailers after a body in chunks are counted likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._count = 0  # bytes since a body or the end of headers was seen
        self._seen = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data:
            size = _PIECE if self._in_headers else len(data)
            piece, data = data[:size], data[size:]
            self._seen = False
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self._count = 0 if self._seen else self._count + len(piece)
            if self._count > MOST_BYTES:
                self._refuse()
                return
        if self._in_headers and self._count:
            self._watch_time()

    def on_headers_complete(self) -> None:
        self._seen, self._in_headers = True, False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._seen = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._seen, self._in_headers = True, True
        super().on_message_complete()

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # Else another answer is being sent.
            self.transport.write(_REFUSAL)
        self.transport.close()

    def _watch_time(self) -> None:
        """Close the connection unless its headers come soon."""
        if self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
