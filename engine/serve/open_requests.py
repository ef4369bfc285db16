"""Requests that the engine answers for: from Submit until their usage is handed to the journal, exactly once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from engine import wire
from engine.serve.connection import Connection

_encode = msgspec.msgpack.Encoder().encode


def submit_bytes(submit: wire.Submit) -> int:
    """What a request keeps in memory."""
    return sum(map(len, submit.prompts)) + len(submit.sampling.grammar)


@dataclass(slots=True)
class OpenRequest:
    """``connection`` None: its gateway is lost. It is over when Finished *and* (Closed or lost)."""

    request_id: str
    context: bytes
    adapter_key: str
    flow: str
    num_bytes: int
    connection: Connection | None
    close: wire.Close | None = None
    finished: wire.Finished | None = None
    finished_unix_ns: int = 0


class OpenRequests:
    """``journal`` gets the payload of each request's UsageRecord when it is over."""

    def __init__(self, journal: Callable[[bytes], None]) -> None:
        self._journal = journal
        self._open: dict[str, OpenRequest] = {}
        self.num_bytes = 0
        self._lost_gpu_ns = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def connection(self, request_id: str) -> Connection | None:
        """Whom its events go to; None when it is lost, rejected or unknown."""
        request = self._open.get(request_id)
        return request.connection if request else None

    def waiting_for(self, adapter_key: str) -> tuple[Connection, str] | None:
        """A gateway with an unfinished request for that adapter, and the request's flow."""
        for request in self._open.values():
            if request.adapter_key == adapter_key and request.finished is None and request.connection is not None:
                return request.connection, request.flow
        return None

    def add(self, submit: wire.Submit, connection: Connection) -> None:
        num_bytes = submit_bytes(submit)
        self._open[submit.request_id] = OpenRequest(
            submit.request_id, submit.context, submit.adapter_key, submit.flow.key, num_bytes, connection
        )
        self.num_bytes += num_bytes

    def reject(self, request_id: str) -> None:
        """The engine didn't accept it: no record."""
        self.num_bytes -= self._open.pop(request_id).num_bytes

    def finish(self, finished: wire.Finished) -> None:
        """All choices have ended. Journaled now if its gateway has closed it or is lost."""
        request = self._open[finished.request_id]
        request.finished, request.finished_unix_ns = finished, time.time_ns()
        if request.close is not None or request.connection is None:
            self._complete(request)

    def close(self, close: wire.Close, connection: Connection) -> bool:
        """A gateway's last word, taken from the request's own gateway, once. True: it runs still and must end."""
        request = self._open.get(close.request_id)
        if request is None or request.connection is not connection or request.close is not None:
            return False
        request.close = close
        if request.finished is None:
            return True
        self._complete(request)
        return False

    def lose(self, connection: Connection) -> list[str]:
        """A gateway is gone: what it hadn't closed will be journaled as lost. Ids that run still and must end."""
        running = []
        for request in self:
            if request.connection is not connection:
                continue
            request.connection = None
            if request.finished is not None:
                self._complete(request)
            else:
                running.append(request.request_id)
        return running

    def lost_family(self) -> wire.Family:
        """Of the attributed time, what was for requests that ended lost: known when they end."""
        samples: list[tuple[str, dict[str, str], float]] = [("_total", {}, self._lost_gpu_ns / 1e9)]
        return wire.Family(
            "tenora_lost_request_gpu_seconds", "counter", "Attributed to requests that ended lost", samples
        )

    def _complete(self, request: OpenRequest) -> None:
        del self._open[request.request_id]
        self.num_bytes -= request.num_bytes
        record = _usage_record(request)
        if record.outcome == wire.OUTCOME_LOST:
            self._lost_gpu_ns += record.gpu_ns
        self._journal(_encode(record))


def _usage_record(request: OpenRequest) -> wire.UsageRecord:
    assert request.finished is not None
    usage = request.finished.usage
    close = request.close or wire.Close(request.request_id, wire.OUTCOME_LOST)
    return wire.UsageRecord(
        request_id=request.request_id,
        context=request.context,
        outcome=close.outcome,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=max(0, usage.output_tokens - close.surplus_tokens),
        queue_ns=usage.queue_ns + close.admit_ns,
        prefill_ns=usage.prefill_ns,
        decode_ns=usage.decode_ns,
        post_ns=close.post_ns,
        network_ns=close.network_ns,
        first_token_ns=close.first_token_ns,
        gpu_ns=usage.gpu_ns,
        finished_unix_ns=request.finished_unix_ns,
        load_ns=usage.load_ns,
        recompute_ns=usage.recompute_ns,
    )
