"""What a GPU's memory is for, reckoned before it is taken: weights, adapters, the work of a step, graphs, and the rest
for keys and values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig, expert_sizes, module_sizes
from engine.models.decoder import Decoder
from engine.models.lora_slots import ExpertSlots, transfer_elements
from engine.models.moe import token_numbers
from engine.runner import SCORE_ROWS
from kernels.quantised_linear import WIDE_BYTES
from kernels.sgmv import RANK_MULTIPLE

USED_SHARE = 0.92  # of the device; the rest is for the driver, libraries and what others take
LIBRARY_BYTES = 512 << 20  # workspaces of cuBLAS, compiled kernels
ADVICE = (
    "An engine takes what is left of a GPU unless --kv-memory says how much is for keys and values: engines that share "
    "one need it each, the first one too"
)


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of one device. They sum to ``total``, which is never exceeded: the allocator refuses more."""

    weights: int
    adapters: int
    step: int
    graphs: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.step + self.graphs + self.kv

    def with_kv(self, wanted: int, least: int) -> "MemoryAccount":
        """With ``wanted`` bytes for keys and values, 0: with what is left. Raises ValueError when that is more than
        there is, or less than ``least``."""
        if max(wanted, least) > self.kv:
            said = f"{wanted / 1e9:.2f} GB are asked for" if wanted else "something else has the rest of the device"
            raise ValueError(f"no room for keys and values: {said}; {self} would be it. {ADVICE}")
        return replace(self, kv=wanted or self.kv)

    def __str__(self) -> str:
        parts = ("weights", "adapters", "step", "graphs", "kv")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.2f} GB" for name in parts)


@contextmanager
def says_what_to_do() -> Iterator[None]:
    """Around what a start allocates. Raises ValueError for a GPU that has no room for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"no room on the GPU: {str(error).partition(' GPU ')[0]} {ADVICE}") from error


def adapter_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """All slots, and the buffer in which an adapter arrives."""
    if not config.adapter_slots:
        return 0
    per_rank = sum(map(sum, module_sizes(model).values())) * model.num_layers
    experts = ExpertSlots(config.expert_adapter_slots or 0, config.max_expert_rank)
    slots = per_rank * config.adapter_slots * _whole(config.max_lora_rank) + _expert_elements(model, experts)
    return dtype.itemsize * (slots + transfer_elements(model, config.max_lora_rank, experts))


def _expert_elements(model: ModelConfig, experts: ExpertSlots) -> int:
    if model.moe is None:
        return 0
    per_rank = sum(map(sum, expert_sizes(model).values())) * len(model.moe.layers) * model.moe.num_experts
    return per_rank * experts.number * _whole(experts.max_lora_rank)


def _whole(lora_rank: int) -> int:
    return -(-lora_rank // RANK_MULTIPLE) * RANK_MULTIPLE


def step_bytes(model: Decoder, config: EngineConfig) -> int:
    """The most that a step keeps at a time: an MLP's inputs and outputs of all tokens (experts': of all pairs), which
    experts each was sent to, logits of all rows (those that draw, or those of a prompt that are scored at a time) and
    sorted copies of them, what weights of 8 bits, if any, are multiplied out into (once more in captured steps)."""
    said, dtype = model.config, model.embedding.dtype
    heads = (said.attention.num_heads + 2 * said.attention.num_kv_heads) * said.attention.head_dim
    of_pairs, choices = token_numbers(said, config.max_expert_rank if config.expert_adapter_slots else 0)
    widest = max(3 * said.intermediate_size, 2 * heads, of_pairs)
    per_token = (4 * said.hidden_size + widest) * dtype.itemsize + choices * torch.int32.itemsize
    per_row = said.vocab_size * (dtype.itemsize + 40)
    num_rows = max(config.max_sequences, SCORE_ROWS)
    widened = 2 * WIDE_BYTES if model.is_quantised else 0
    return config.max_step_tokens * per_token + num_rows * per_row + widened


def account(model: Decoder, config: EngineConfig, device: torch.device, graph_bytes: int) -> MemoryAccount:
    """For a device on which the model is, and nothing else of ours. ``config.num_blocks`` does not matter."""
    free_bytes, device_bytes = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_reserved(device)
    of_others = device_bytes - free_bytes - weights
    adapters, step = adapter_bytes(model.config, config, model.embedding.dtype), step_bytes(model, config)
    graphs = graph_bytes + LIBRARY_BYTES
    kv = int(device_bytes * USED_SHARE) - of_others - weights - adapters - step - graphs
    return MemoryAccount(weights, adapters, step, graphs, kv)
