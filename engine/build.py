"""Composition: from options to a running Engine and the cards that describe it. Sizes are resolved here, once."""

import logging
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine import wire
from engine.config import HOST_ADAPTER_BYTES, MAX_EXPERT_RANK, EngineConfig
from engine.engine import Engine
from engine.gpu.plain_torch import without_kernel
from engine.gpu.shapes import ONE_SHAPE, in_one_shape, shapes_of
from engine.memory import copy_bytes_s, keep_freed_memory
from engine.memory_account import MemoryAccount, account, says_what_to_do
from engine.models.config import ModelConfig, module_sizes
from engine.models.decoder import Decoder
from engine.phases import Phases
from engine.runner import Runner
from engine.weights import load_model

if TYPE_CHECKING:
    from kernels.ahead import Compilers

logger = logging.getLogger("engine.build")

MOST_COMPILERS = 12
CPU_KV_BYTES = 1 << 30
BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULTS = {  # max_step_tokens, max_running, adapter_slots
    "cpu": (512, 64, 8),
    "cuda": (8192, 256, 64),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; 0 and "auto" are resolved by ``build``."""

    model: str
    source: str | Path  # as load_model takes it
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    block_size: int = 16
    kv_blocks: int = 0
    kv_memory_bytes: int = 0
    context_tokens: int = 0
    max_step_tokens: int = 0
    max_running: int = 0
    adapter_slots: int = 0
    max_adapter_rank: int = 64
    expert_adapter_slots: int = 0
    max_expert_adapter_rank: int = MAX_EXPERT_RANK
    host_adapter_bytes: int = HOST_ADAPTER_BYTES
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    card: wire.ModelCard
    tokenizer: wire.TokenizerCard


@says_what_to_do()
def build(options: Options, phases: Phases | None = None) -> Built:
    """Loads the model and allocates everything. Raises UnsupportedModel, ValueError for impossible sizes."""
    phases = phases or Phases()
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    if device.type == "cpu":
        keep_freed_memory()
    compilers = begin_compilers(device)
    phases.ended("device")
    loaded = load_model(options.source, dtype, device, keep_quantised=device.type == "cuda")
    phases.ended("weights")
    model = Decoder(loaded.config, loaded.weights)
    loaded.weights.clear()  # what the decoder fused is there twice
    config = resolve_sizes(options, model, dtype, device)
    phases.ended("model")
    engine = Engine(config, make_runner(model, config, phases, compilers))
    card = _card(options, config, loaded.config, loaded.revision, dtype, device)
    phases.ended("digest")
    return Built(engine, card, loaded.tokenizer)


def begin_compilers(device: torch.device) -> "Compilers | None":
    """Of a GPU's kernels; they get ready while the weights are read."""
    if device.type == "cpu":
        return None
    from kernels.ahead import Compilers, target_here

    return Compilers(min(MOST_COMPILERS, max(1, (os.cpu_count() or 2) * 3 // 4)), target_here())


def make_runner(model: Decoder, config: EngineConfig, phases: Phases, compilers: "Compilers | None") -> Runner:
    """The runner of the model's device, ready for its first step."""
    if model.embedding.device.type == "cpu":
        runner = Runner(model, config, copy_bytes_s())
        phases.ended("pools")
        return runner
    from engine.gpu.runner import CudaRunner
    from kernels.ahead import warn_of_compiling

    assert compilers is not None, "a GPU's kernels are compiled before they are launched"
    runner = CudaRunner(model, config)
    phases.ended("pools")
    with closing(compilers):
        compilers.rehearse(runner.rehearse)
    phases.ended("kernels")
    warn_of_compiling()
    runner.warm()
    phases.ended("launches")
    runner.capture()
    phases.ended("graphs")
    return runner


def resolve_device(name: str) -> torch.device:
    """Raises ValueError where a GPU is asked for and can't be used."""
    is_there = torch.cuda.is_available()
    if name == "cuda" and not is_there:
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here (nvidia-smi shows what there is)")
    if name == "auto":
        name = "cuda" if is_there else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the device computes it, which few CPUs do; fp32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    fast = device.type == "cuda" or bool(BF16_CPU_FLAGS & _cpu_flags())
    return torch.bfloat16 if fast else torch.float32


def resolve_sizes(options: Options, model: Decoder, dtype: torch.dtype, device: torch.device) -> EngineConfig:
    """The blocks that the memory has room for, and a context that the model and these blocks allow."""
    config = step_sizes(options, model.config, dtype, device)
    block_bytes = kv_block_bytes(model.config, options.block_size, dtype)
    memory_bytes = options.kv_blocks * block_bytes or options.kv_memory_bytes
    if device.type == "cuda":
        memory_bytes = _reserve(account_of(model, config, device).with_kv(memory_bytes, block_bytes), device)
    config = replace(config, num_blocks=(memory_bytes or CPU_KV_BYTES) // block_bytes)
    return replace(config, context_tokens=min(config.context_tokens, config.pool_tokens))


def step_sizes(options: Options, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> EngineConfig:
    """All but what depends on the device's memory. Raises ValueError for a deterministic engine that can't be."""
    max_step_tokens, max_running, adapter_slots = DEFAULTS[device.type]
    if options.expert_adapter_slots and model.moe is None:
        raise ValueError("--expert-adapter-slots: the model has no experts")
    config = EngineConfig(
        block_size=options.block_size,
        num_blocks=options.kv_blocks or 1,
        context_tokens=min(options.context_tokens or model.context_tokens, model.context_tokens),
        max_step_tokens=options.max_step_tokens or max_step_tokens,
        max_running=options.max_running or max_running,
        adapter_slots=options.adapter_slots or adapter_slots,
        max_lora_rank=options.max_adapter_rank,
        expert_adapter_slots=options.expert_adapter_slots if device.type == "cuda" else None,
        max_expert_rank=options.max_expert_adapter_rank,
        deterministic=options.deterministic,
        host_adapter_bytes=options.host_adapter_bytes,
    )
    if config.deterministic and device.type == "cuda":
        return _in_one_shape(options, config, without_kernel(model, dtype))
    return config


def _in_one_shape(options: Options, config: EngineConfig, without: tuple[str, ...]) -> EngineConfig:
    if without:
        raise ValueError(f"--deterministic: plain torch has no fixed shape on a GPU ({', '.join(without)})")
    config = in_one_shape(replace(config, max_step_tokens=options.max_step_tokens or ONE_SHAPE))
    size = shapes_of(config).tokens[0]
    logger.info("deterministic: each step is computed as %d tokens, and has %d at most", size, config.max_step_tokens)
    return config


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block over all layers."""
    attention = model.attention
    return 2 * model.num_layers * block_size * attention.num_kv_heads * attention.head_dim * dtype.itemsize


def account_of(model: Decoder, config: EngineConfig, device: torch.device) -> MemoryAccount:
    """Of the GPU, with all that is left for keys and values."""
    from engine.gpu.decode_graphs import graph_bytes

    torch.cuda.empty_cache()  # what the weights were made from
    return account(model, config, device, graph_bytes(model.config, config, device))


def _reserve(found: MemoryAccount, device: torch.device) -> int:
    """The allocator refuses more from here on → bytes for keys and values."""
    logger.info("device memory: %s; no more is taken (--kv-memory leaves room for another engine)", found)
    torch.cuda.set_per_process_memory_fraction(found.total / torch.cuda.mem_get_info(device)[1], device)
    return found.kv


def _cpu_flags() -> set[str]:
    """The first processor's flags; empty where the system doesn't say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _card(
    options: Options, config: EngineConfig, model: ModelConfig, revision: str, dtype: torch.dtype, device: torch.device
) -> wire.ModelCard:
    return wire.ModelCard(
        model=options.model,
        revision=revision,
        vocab_size=model.vocab_size,
        context_tokens=config.context_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_layers=model.num_layers,
        modules=module_sizes(model),
        max_lora_rank=config.max_lora_rank,
        adapter_slots=config.adapter_slots,
        eos_token_ids=model.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        experts=_expert_card(model, config),
    )


def _expert_card(model: ModelConfig, config: EngineConfig) -> wire.ExpertCard | None:
    if model.moe is None:
        return None
    return wire.ExpertCard(
        num_experts=model.moe.num_experts,
        hidden_size=model.hidden_size,
        width=model.moe.intermediate_size,
        layers=model.moe.layers,
        takes_adapters=config.expert_adapter_slots != 0,
        max_lora_rank=0 if config.expert_adapter_slots is None else config.max_expert_rank,
    )
