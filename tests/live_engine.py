"""A whole engine server in this process: real socket, real step thread, the tiny random model."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tiny import Adapter, tiny_config, tiny_tokenizer, tiny_weights

from engine import wire
from engine.client import AdapterFile, EngineClient, EngineStream
from engine.config import EngineConfig
from engine.engine import Engine
from engine.journal import Journal
from engine.models.config import MODULES, module_sizes
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.serve.adapter_tiers import DiskTier
from engine.serve.server import Identity, Server
from engine.wire.records import is_time

PATIENCE_S = 60.0  # how long a test waits for what must come

CONFIG = EngineConfig(num_blocks=256, context_tokens=512, max_step_tokens=128, adapter_slots=2, max_lora_rank=8)
TOKENIZER = wire.TokenizerCard(tiny_tokenizer().to_str(), "template", {"eos_token": "x"}, False)


def tiny_engine(config: EngineConfig = CONFIG) -> Engine:
    torch.set_num_threads(1)
    return Engine(config, Runner(Decoder(tiny_config(), tiny_weights()), config))


def tiny_card(config: EngineConfig = CONFIG) -> wire.ModelCard:
    model = tiny_config()
    return wire.ModelCard(
        model="tiny",
        revision="00" * 32,
        vocab_size=model.vocab_size,
        context_tokens=config.context_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_layers=model.num_layers,
        modules=module_sizes(model),
        max_lora_rank=config.max_lora_rank,
        adapter_slots=config.adapter_slots,
        eos_token_ids=model.eos_token_ids,
        dtype="float32",
        device="cpu",
    )


def socket_of(folder: Path) -> Path:
    return folder / "run" / "e.sock"


@asynccontextmanager
async def live_server(
    folder: Path, config: EngineConfig = CONFIG, *, time_record_s: float = 3600.0
) -> AsyncIterator[Server]:
    """Serves at ``socket_of(folder)``; journal and adapters below ``folder`` outlive it. Its time is recorded for who
    asks, so that others may count records."""
    identity = Identity("engine-t", tiny_card(config), TOKENIZER)
    disk = DiskTier(folder / "adapters")
    server = Server(identity, tiny_engine(config), Journal(folder), disk, time_record_s=time_record_s)
    await server.start(socket_of(folder))
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def live_client(folder: Path, peer: str = "gateway-0", **options) -> AsyncIterator[EngineClient]:
    client = EngineClient(str(socket_of(folder)), peer, **options)
    await client.start()
    try:
        await client.ready(PATIENCE_S)
        yield client
    finally:
        await client.close()


def submit(request_id: str, prompt: list[int] | None = None, *, max_tokens: int = 8, **fields) -> wire.Submit:
    """A greedy request that doesn't end before ``max_tokens``."""
    sampling = fields.pop("sampling", wire.SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))
    values = {
        "request_id": request_id,
        "prompts": [wire.pack_ids(prompt or [5, 6, 7, 8])],
        "sampling": sampling,
        "flow": wire.Flow("flow"),
        "cache_namespace": b"n" * 32,
        "granted_tokens": max_tokens,
        "context": request_id.encode(),
    }
    return wire.Submit(**{**values, **fields})


async def collect(stream: EngineStream) -> tuple[list[int], wire.Finished | wire.Rejected]:
    """All tokens of all choices in arrival order, and the terminal event."""
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for event in await stream.next():
                if isinstance(event, wire.Delta):
                    tokens += wire.unpack_ids(event.token_ids)
                elif isinstance(event, wire.Finished | wire.Rejected):
                    return tokens, event


async def first_delta(stream: EngineStream) -> wire.Delta:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for event in await stream.next():
                if isinstance(event, wire.Delta):
                    return event


class Ledger:
    """Takes records and acknowledges them, or not, as a gateway does. ``arrived`` are those of usage, ``times`` the
    engine's own."""

    def __init__(self, *, acks: bool = True) -> None:
        self.acks = acks
        self.client: EngineClient | None = None
        self.arrived: asyncio.Queue[wire.Record] = asyncio.Queue()
        self.times: asyncio.Queue[wire.TimeRecord] = asyncio.Queue()

    async def take(self, record: wire.Record) -> None:
        if self.acks and self.client is not None:
            await self.client.ack(record.number, record.hash)
        if is_time(record.payload):
            self.times.put_nowait(msgspec.msgpack.decode(record.payload, type=wire.TimeRecord))
        else:
            self.arrived.put_nowait(record)

    async def next(self) -> tuple[wire.Record, wire.UsageRecord]:
        async with asyncio.timeout(PATIENCE_S):
            record = await self.arrived.get()
        return record, decode_usage(record)


def decode_usage(record: wire.Record) -> wire.UsageRecord:
    usage = wire.read_record(record.payload)
    assert isinstance(usage, wire.UsageRecord)
    return usage


@asynccontextmanager
async def live_gateway(folder: Path, peer: str = "gateway-0", *, acks: bool = True, **options):
    """A client with a ledger: (client, ledger)."""
    ledger = Ledger(acks=acks)
    async with live_client(folder, peer, on_record=ledger.take, **options) as client:
        ledger.client = client
        yield client, ledger


async def until(condition, what: str) -> None:
    """Waits for something that has no event of its own."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


def canonical_file(path: Path, adapter: Adapter, *, padding: int = 0) -> AdapterFile:
    """An adapter in Tenora's format; ``padding`` bytes more in its header make it span chunks."""
    order = sorted(adapter, key=lambda pair: (pair[0], MODULES.index(pair[1])))
    listed = [[layer, module, adapter[layer, module][0].shape[0], adapter[layer, module][2]] for layer, module in order]
    tensors = {}
    for layer, module in order:
        a, b, _ = adapter[layer, module]
        tensors[f"{layer}.{module}.A"], tensors[f"{layer}.{module}.B"] = a.contiguous(), b.contiguous()
    metadata = {"format": "tenora-lora-1", "pairs": json.dumps(listed, separators=(",", ":")), "pad": "x" * padding}
    save_file(tensors, path, metadata=metadata)
    content = path.read_bytes()
    return AdapterFile(path, hashlib.sha256(content).hexdigest(), len(content))
