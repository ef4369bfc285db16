"""The engine's socket server: frames to the step thread, its results to the gateways, usage to the journal.

Threads: this event loop (I/O and all bookkeeping), the step thread (the Engine), the journal's writer and the
adapters' executor. Only the loop touches what is in this file.
"""

import asyncio
import logging
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine import wire
from engine.engine import Engine, StepResult
from engine.grammar import Compiler
from engine.journal import Journal
from engine.metering.time_records import Timekeeper, TimeRecords
from engine.serve.adapter_tiers import AdapterTiers, DiskTier, with_disk_tier
from engine.serve.connection import Connection
from engine.serve.grammar_gate import GrammarGate
from engine.serve.open_requests import OpenRequests, submit_bytes
from engine.serve.record_delivery import RecordDelivery
from engine.serve.step_thread import StepOutput, StepThread

logger = logging.getLogger("engine.server")

MAX_OPEN_BYTES = 256 << 20  # prompts of all open requests together
TICK_S = TIME_RECORD_S = 1.0
_ADAPTER_KEY = re.compile(r"[A-Za-z0-9_-]{0,100}")  # it names a file


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the engine says that it is."""

    engine_id: str
    card: wire.ModelCard
    tokenizer: wire.TokenizerCard


class Server:
    """One engine process's service. ``start`` → clients connect → ``drain`` → ``stop``.

    ``broken`` is set with an exception when the process must end: the engine or the journal isn't to be trusted.
    Construct it inside a running event loop.
    """

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        journal: Journal,
        disk: DiskTier,
        *,
        time_record_s: float = TIME_RECORD_S,
    ) -> None:
        self.draining = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._identity = identity
        self._engine = engine
        self._connections: set[Connection] = set()
        self._disk = disk
        self._records = RecordDelivery(journal)
        self._open = OpenRequests(self._records.append)
        self._last_refusal: wire.MemoryRefusal | None = None
        self._steps = StepThread(engine, self._deliver, self._break)
        timekeeper = Timekeeper(identity.engine_id, identity.card.model, engine.stats)
        self._times = TimeRecords(timekeeper, self._steps.ask, self._records.append, time_record_s)
        compiler = Compiler(identity.tokenizer.tokenizer_json, identity.card.vocab_size, identity.card.eos_token_ids)
        self._gate = GrammarGate(self._steps, compiler, self._reject)
        self._adapters = AdapterTiers(
            disk, self._open.waiting_for, self._adapter_ready, self._adapter_failed, engine.prepare_adapter
        )
        self._delivery: asyncio.Task[None] | None = None
        self._ticking: asyncio.Future[tuple[None, None]] | None = None
        self._server: asyncio.Server | None = None
        self._quiet = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet journaled."""
        return len(self._open)

    async def start(self, socket_path: Path) -> None:
        """Listens. Raises PermissionError when others could reach the socket's folder."""
        socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if stat.S_IMODE(socket_path.parent.stat().st_mode) & 0o077:
            raise PermissionError(f"the socket's folder must be 0700, not open to others: {socket_path.parent}")
        self._steps.start()
        self._delivery = asyncio.create_task(self._records.run())
        self._delivery.add_done_callback(self._delivery_ended)
        self._ticking = asyncio.gather(self._tick(), self._times.run())
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, str(socket_path))
        socket_path.chmod(0o600)

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, lets what runs finish, delivers the records: until the timeout, or until it breaks."""
        self.draining = True
        finishing = asyncio.create_task(self._finish())
        await asyncio.wait({finishing, self.broken}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finishing.cancel()

    async def stop(self) -> None:
        """Ends everything; requests that are left are journaled as lost."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            self._forsake(connection)
        with suppress(TimeoutError):
            async with asyncio.timeout(10):  # a few steps at most
                if not self.broken.done():
                    await self._until_quiet()
        if self.broken.done():
            self.broken.exception()  # seen, whoever asks for it or not
        await self._gate.close()
        await asyncio.to_thread(self._steps.stop)
        await self._adapters.close()
        self._records.end()
        if self._ticking is not None and self._delivery is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, self._delivery, return_exceptions=True)
        await asyncio.to_thread(self._records.close)
        for connection in list(self._connections):
            connection.abort()

    # ── connections (Listener) ───────────────────────────────────────────────────────────────────

    def _accept(self) -> Connection:
        connection = Connection(self)
        self._connections.add(connection)
        return connection

    def greeted(self, connection: Connection) -> None:
        assert connection.hello is not None
        hello, identity = connection.hello, self._identity
        tokenizer = identity.tokenizer if hello.want_tokenizer else None
        connection.send(wire.Welcome(identity.engine_id, wire.PROTOCOL_VERSION, identity.card, tokenizer))
        if hello.version not in wire.ACCEPTED_VERSIONS:
            logger.error("%r speaks protocol %d, we %s", connection.name, hello.version, sorted(wire.ACCEPTED_VERSIONS))
            connection.close_after_sending()
        elif hello.role == "gateway":
            logger.info("gateway %r connected", connection.name)
            self._records.connected(connection)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._forsake(connection)
        if connection.hello and connection.hello.role == "gateway":
            logger.info("gateway %r disconnected", connection.name)

    def received(self, connection: Connection, message: wire.ToEngine) -> None:
        if isinstance(message, wire.StatsRequest):
            self._steps.stats(lambda families: self._send_stats(connection, message.seq, families))
        elif isinstance(message, wire.AdapterForget):
            self._adapters.forget(message.adapter_key)
            self._steps.post(self._engine.forget_adapter, message.adapter_key)
        elif isinstance(message, wire.ResidencyRequest):
            self._steps.ask(
                lambda: self._engine.adapters.residency(message.keys),
                lambda tiers: connection.send(wire.ResidencyReply(message.seq, self._disk.join(tiers, message.keys))),
            )
        elif not connection.is_gateway:
            raise wire.WireError("an observer may only ask, and have adapters forgotten")
        else:
            self._received_of_gateway(connection, message)

    def _received_of_gateway(self, connection: Connection, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                self._submit(connection, message)
            case wire.Close():
                if self._open.close(message, connection):
                    self._gate.post(message.request_id, self._engine.abort, message.request_id)
                self._look_quiet()
            case wire.Grant() if self._open.connection(message.request_id) is connection:
                self._gate.post(message.request_id, self._engine.grant, message.request_id, message.granted_tokens)
            case wire.Abort() if self._open.connection(message.request_id) is connection:
                self._gate.post(message.request_id, self._engine.abort, message.request_id, message.choice)
            case wire.AdapterChunk() | wire.AdapterUnavailable():
                self._adapters.receive(connection, message)
            case wire.Ack():
                self._records.acked(message)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def _submit(self, connection: Connection, submit: wire.Submit) -> None:
        refusal = self._refusal(submit)
        if refusal is not None:
            connection.send(wire.Rejected(submit.request_id, *refusal))
            return
        self._open.add(submit, connection)
        self._gate.submit(submit)
        if submit.adapter_key:
            self._adapters.waiting(submit.adapter_key)

    def _refusal(self, submit: wire.Submit) -> tuple[str, str] | None:
        """What the engine itself can't see: (code, message)."""
        if submit.request_id in self._open:
            return "invalid", "a request of this id is in flight"
        if len(submit.context) > wire.MAX_CONTEXT_BYTES:
            return "invalid", f"the context has {len(submit.context)} bytes, {wire.MAX_CONTEXT_BYTES} are allowed"
        if not _ADAPTER_KEY.fullmatch(submit.adapter_key):
            return "invalid", "the adapter key isn't one"
        if any(len(prompt) % 4 for prompt in submit.prompts):
            return "invalid", "a prompt isn't whole int32 token ids"
        if self.draining:
            return "draining", "the engine is shutting down"
        if self._open.num_bytes + submit_bytes(submit) > MAX_OPEN_BYTES:
            return "busy", "the engine holds too many bytes of prompts"
        if submit.sampling.grammar and self._gate.is_full:
            return "busy", "too many grammars wait to be compiled"
        if self._records.failing:
            return "busy", "the engine can't journal usage"
        return None

    def _deliver(self, output: StepOutput) -> None:
        """What a step has for the gateways: one frame for each and who is finished, in one piece."""
        for rejected in output.rejected:
            if rejected.code in ("busy", "too_long"):
                self._last_refusal = wire.MemoryRefusal(rejected.code, rejected.message, int(time.time()))
            _send(self._open.connection(rejected.request_id), rejected)
            self._open.reject(rejected.request_id)
        if output.result is not None:
            for connection, messages in _told(self._open, output.result).items():
                connection.send(*messages)
            for finished in output.result.finished:
                self._open.finish(finished)
            for key in output.result.wanted:
                self._adapters.want(key)
        self._look_quiet()

    def _reject(self, request_id: str, code: str, message: str) -> None:
        self._deliver(StepOutput([wire.Rejected(request_id, code, message)]))

    def _forsake(self, connection: Connection) -> None:
        """That gateway is gone: its requests end within two steps and are journaled as lost."""
        self._records.disconnected(connection)
        for request_id in self._open.lose(connection):
            self._gate.post(request_id, self._engine.abort, request_id)
        self._adapters.lost(connection)
        self._look_quiet()

    def _adapter_ready(self, key: str, weights) -> None:
        self._steps.post(self._engine.adapter_ready, key, weights)

    def _adapter_failed(self, key: str, code: str, message: str) -> None:
        self._steps.post(self._engine.adapter_failed, key, code, message)

    # ── the process ──────────────────────────────────────────────────────────────────────────────

    def _send_stats(self, connection: Connection, seq: int, families: list[wire.Family]) -> None:
        num_gateways = sum(each.is_gateway for each in self._connections)
        own = own_families(self._open, num_gateways, self._records)
        told = [*with_disk_tier(families, self._disk), *self._gate.families(), *own]
        connection.send(wire.StatsReply(seq, told, self._last_refusal))

    async def _finish(self) -> None:
        await self._until_quiet()
        await self._records.settle()

    async def _until_quiet(self) -> None:
        while len(self._open):
            self._quiet.clear()
            await self._quiet.wait()

    def _look_quiet(self) -> None:
        if not len(self._open):
            self._quiet.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._records.tick()

    def _delivery_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the journal can't be trusted: %s", error)
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
        self._quiet.set()


def _told(requests: OpenRequests, result: StepResult) -> dict[Connection, list[wire.ToGateway]]:
    """What a step has for each gateway."""
    frames: dict[Connection, wire.StepFrame] = {}
    for delta in result.deltas:
        connection = requests.connection(delta.request_id)
        if connection is not None:
            frames.setdefault(connection, wire.StepFrame([], [])).deltas.append(delta)
    for each in result.scores:
        connection = requests.connection(each.request_id)
        if connection is not None:
            frames.setdefault(connection, wire.StepFrame([], [])).scores.append(each)
    told: dict[Connection, list[wire.ToGateway]] = {connection: [frame] for connection, frame in frames.items()}
    for finished in result.finished:
        connection = requests.connection(finished.request_id)
        if connection is not None:
            told.setdefault(connection, []).append(finished)
    return told


def own_families(requests: OpenRequests, num_gateways: int, records: RecordDelivery) -> list[wire.Family]:
    gauges = (
        ("tenora_engine_open_requests", "Requests not yet journaled.", len(requests)),
        ("tenora_engine_gateways", "Connected gateways.", num_gateways),
        ("tenora_usage_records", "Records since the journal's beginning.", records.num_records),
        ("tenora_usage_records_unacked", "Records that no ledger has.", records.num_unacked),
        ("tenora_usage_stalled_seconds", "How long records wait, and none is acknowledged.", records.stalled_s),
        ("tenora_usage_journal_failing", "1 while the journal can't be written.", int(records.failing)),
    )
    told = [wire.Family(name, "gauge", text, [("", {}, float(value))]) for name, text, value in gauges]
    return [*told, requests.lost_family()]


def _send(connection: Connection | None, message: wire.ToGateway) -> None:
    if connection is not None:
        connection.send(message)
