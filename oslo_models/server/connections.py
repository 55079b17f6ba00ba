"""Connections of HTTP clients, with limits for their number and for slow clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from oslo_models.keep_alive import keep_alive

MOST_EARLY = 1 << 16
"""Limit of bytes that a client sends after a request, before the answer is complete."""
MOST_HEADERS = 1 << 16
"""Limit of bytes in the headers of a request."""
MOST_CHUNKS, LEAST_CHUNK = 1024, 256
"""Limit of chunks in a body, if they have fewer bytes than this on average."""
_COMPLETE = (h11.DONE, h11.MUST_CLOSE)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits for connections and slow clients.

    Attributes:
        connections: limit of open connections. Beyond it, the server closes the connection that has waited longest for
            its client, idle or inside a request. If none waits for its client, it closes the new connection.
        header_seconds: limit from the first to the last byte of a request's headers; also until the first request.
        write_seconds: limit for a client to read nothing while the server sends an answer.
        linger_seconds: time to read the rest of a rejected body, so that its sender sees the answer.
    """

    connections: int = 1000
    header_seconds: float = 15.0
    write_seconds: float = 60.0
    linger_seconds: float = 5.0


def protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return the connection class for the ``http`` option of uvicorn."""

    class LimitedConnection(_LimitedConnection):
        """Connection with these limits."""

        own_limits = limits

    return LimitedConnection


class _BoundedChunks(h11.Connection):
    """Refuses bodies in many small chunks. Each takes the event loop as long as a large chunk."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + event.chunk_start, self._bytes + len(event.data)
            if self._chunks > MOST_CHUNKS and self._bytes < LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class _LimitedConnection(H11Protocol):
    own_limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedChunks(h11.SERVER, self.config.h11_max_incomplete_event_size or MOST_HEADERS)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._early = b""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            keep_alive(connection)
        self._idle_since = self.loop.time()
        self._make_room()
        self._expect("headers", self.own_limits.header_seconds)

    def _make_room(self) -> None:
        """Close a connection if too many are open. Closing connections do not count."""
        if len(self.connections) <= self.own_limits.connections:
            return
        made = [each for each in self.connections if isinstance(each, _LimitedConnection)]
        others = [each for each in made if each is not self and not each.transport.is_closing()]
        if len(others) >= self.own_limits.connections:
            waiting = [each for each in others if each.waits_for_client]
            (min(waiting, key=lambda each: each._idle_since) if waiting else self).abort()

    @property
    def waits_for_client(self) -> bool:
        """Whether the server waits for this client: every complete request (headers and body) has an answer."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.cycle is None

    def data_received(self, data: bytes) -> None:
        if self._early or self._is_answering:
            # The start of the next request. h11 would stop reading here, and would not notice that the client leaves.
            self._early += data
            if len(self._early) > MOST_EARLY:
                self.abort()
            return
        super().data_received(data)
        if self._is_answering:
            self.flow.resume_reading()
        self._update_timers()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and self.conn.their_state in _COMPLETE

    def _read_early(self) -> None:
        """Process the bytes that arrived while the last request was answered."""
        data, self._early = self._early, b""
        if data and not self.transport.is_closing():
            self.data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if not self.transport.is_closing():
            self._update_timers(bool(self.conn.trailing_data[0]))
            if self._early:
                self.loop.call_soon(self._read_early)

    def _update_timers(self, is_receiving: bool = True) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._done("headers")
        elif is_receiving:
            self._expect("headers", self.own_limits.header_seconds)
        if self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._expect("rest", self.own_limits.linger_seconds)
        else:
            self._done("rest")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reader", self.own_limits.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._done("reader")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._done(name)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        self.transport.abort()

    def _expect(self, name: str, seconds: float) -> None:
        """Abort the connection after ``seconds``, unless `_done` is called for the same name before."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.abort)

    def _done(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
