"""An engine that answers at once, for what a request costs its gateway: the wire, the journal and the tokenizer are the
engine's own, the answer is one token, again and again, and no model is computed.

``python -m ops.bench.answering_engine --serve OPTIONS`` is ``tenora serve OPTIONS`` with engines of this kind.
"""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

import click

from engine import wire
from engine.journal import Journal
from engine.serve.connection import Connection
from engine.serve.open_requests import OpenRequests
from engine.serve.record_delivery import RecordDelivery
from engine.serve.server import own_families

STEP_S = 0.002  # between two tokens of an answer; the first comes at once
CONTEXT_TOKENS = 4096


class AnsweringEngine:
    """All running requests get a token each in every step, as they would in a batch."""

    def __init__(self, welcome: wire.Welcome, journal: Journal, token_id: int) -> None:
        self._welcome = welcome
        self._records = RecordDelivery(journal)
        self._open = OpenRequests(self._records.append)
        self._token = wire.pack_ids([token_id])
        self._running: dict[str, tuple[Connection, wire.Submit, int]] = {}  # tokens so far
        self._began_ns: dict[str, int] = {}
        self._stepping: asyncio.Handle | None = None

    async def serve(self, address: Path) -> None:
        """Until SIGTERM or SIGINT, or its parent's end."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        delivery = asyncio.create_task(self._records.run())
        server = await loop.create_unix_server(lambda: Connection(self), str(address))
        print(f"engine ready {self._welcome.engine_id}", flush=True)
        await stop.wait()
        server.close()
        self._records.end()
        await delivery
        await asyncio.to_thread(self._records.close)

    def greeted(self, connection: Connection) -> None:
        connection.send(self._welcome)
        if connection.is_gateway:
            self._records.connected(connection)

    def lost(self, connection: Connection) -> None:
        self._records.disconnected(connection)
        for request_id in self._open.lose(connection):
            del self._running[request_id], self._began_ns[request_id]

    def received(self, connection: Connection, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                self._open.add(message, connection)
                self._running[message.request_id] = connection, message, 0
                self._began_ns[message.request_id] = time.monotonic_ns()
                self._stepping = self._stepping or asyncio.get_running_loop().call_soon(self._step)
            case wire.Close():
                self._open.close(message, connection)
            case wire.Ack():
                self._records.acked(message)
            case wire.StatsRequest():
                connection.send(wire.StatsReply(message.seq, own_families(self._open, 1, self._records)))
            case wire.ResidencyRequest():
                connection.send(wire.ResidencyReply(message.seq, {}))

    def _step(self) -> None:
        frames: dict[Connection, list[wire.Delta]] = {}
        ended: dict[Connection, list[wire.Finished]] = {}
        for request_id, (connection, submit, number) in list(self._running.items()):
            is_last = number + 1 >= submit.sampling.max_tokens
            delta = wire.Delta(request_id, 0, self._token, (), "length" if is_last else "")
            frames.setdefault(connection, []).append(delta)
            self._running[request_id] = connection, submit, number + 1
            if is_last:
                ended.setdefault(connection, []).append(self._finish(submit))
        for connection, deltas in frames.items():
            connection.send(wire.StepFrame(deltas), *ended.get(connection, ()))
        self._stepping = asyncio.get_running_loop().call_later(STEP_S, self._step) if self._running else None

    def _finish(self, submit: wire.Submit) -> wire.Finished:
        del self._running[submit.request_id]
        took_ns = time.monotonic_ns() - self._began_ns.pop(submit.request_id)
        prompt_tokens = sum(map(len, submit.prompts)) // 4
        used = wire.Usage(prompt_tokens, 0, submit.sampling.max_tokens, decode_ns=took_ns)
        finished = wire.Finished(submit.request_id, used)
        self._open.finish(finished)
        return finished


def _welcome(engine_id: str, model: str, folder: Path) -> wire.Welcome:
    """As an engine with the model in ``folder`` says it; of what is computed, nothing."""
    from engine.weights.tokenizer import card_from_directory

    tokenizer = card_from_directory(folder)
    vocab_size = _vocab_size(tokenizer)
    sizes = {"block_size": 16, "num_blocks": 1024, "num_layers": 1, "modules": {}, "max_lora_rank": 0}
    card = wire.ModelCard(
        **{"model": model, "revision": "0" * 64, "vocab_size": vocab_size, "context_tokens": CONTEXT_TOKENS},
        **sizes,
        **{"adapter_slots": 0, "eos_token_ids": (), "dtype": "float32", "device": "none"},
    )
    return wire.Welcome(engine_id, wire.PROTOCOL_VERSION, card, tokenizer)


def _vocab_size(tokenizer: wire.TokenizerCard) -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer.tokenizer_json).get_vocab_size()


def _engine(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine-id", required=True)
    options, _ = parser.parse_known_args(arguments)
    name, _, source = options.model.partition("=")
    welcome = _welcome(options.engine_id, name, Path(source))
    options.socket.unlink(missing_ok=True)
    token_id = welcome.card.vocab_size // 2
    asyncio.run(_run(welcome, options.dir, options.socket, token_id))


async def _run(welcome: wire.Welcome, folder: Path, address: Path, token_id: int) -> None:
    await AnsweringEngine(welcome, Journal(folder), token_id).serve(address)


def _serve(arguments: list[str]) -> None:
    from gateway.launchers.local import LocalLauncher
    from gateway.logs import log_to_stderr
    from gateway.serve.supervisor import serve
    from gateway.settings import Settings, serve_options

    @click.command(params=list(serve_options()))
    def command(**options) -> None:
        settings = Settings.from_options(options)
        log_to_stderr(settings.log_level)
        serve(settings, LocalLauncher(settings.child_environment(), module="ops.bench.answering_engine"))

    command(arguments)


if __name__ == "__main__":
    _serve(sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else _engine(sys.argv[1:])
