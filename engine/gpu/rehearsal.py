"""Every kind of step that a GPU can be given, launched once: inside a rehearsal (kernels/ahead.py), so that no client's
step is the one that waits for a compiler.

What is launched depends on a step's number of tokens by the tables of tiles only, on its adapters by their largest
rank, and in attention on how many queries its sequences have and whether their keys are cut.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig
from engine.gpu.decode_graphs import DecodeGraphs, graph_kinds
from engine.gpu.piece_graphs import PieceGraphs
from engine.gpu.shapes import shapes_of
from engine.gpu.shared_prefixes import may_share
from engine.models.attention import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from kernels.paged_attention import (
    MAX_SPLIT_QUERIES,
    MIN_MEMBERS,
    MIN_TOKENS,
    AttentionPlan,
    PrefixGroup,
    plan_attention,
)
from kernels.sampling import Edits, SamplingRows, edit_logits, highest, sample
from kernels.sgmv import plan_sgmv
from kernels.upload import ALIGNED

_CHUNK = MAX_SPLIT_QUERIES + 1  # queries: the fewest that are a chunk of a prompt


@torch.inference_mode()
def rehearse(model: Decoder, kv: KVCache, slots: LoraSlots, config: EngineConfig) -> None:
    """``kv`` and ``slots`` are not written in a rehearsal. Not for a model that is without some kernel."""
    thin, device = model.with_one_layer_of_each_kind(), model.embedding.device
    drawn = torch.zeros(max(shapes_of(config).tokens[-1], config.max_sequences), dtype=torch.int64, device=device)
    shared = thin, kv, slots, drawn, config, None
    PieceGraphs(*shared).launch()
    if graph_kinds(model.config, config):
        DecodeGraphs(*shared).launch()
    _attend(thin, kv, config)
    _steps_by_hand(thin, kv, slots, config)
    _sample(model.embedding.new_zeros(1, model.config.vocab_size))


def plans_of_prompts(model: ModelConfig, config: EngineConfig, device: torch.device) -> Iterator[AttentionPlan]:
    """Attention of steps that no graph holds: together these launch every form that such a step can."""
    for length in (_CHUNK, max(_CHUNK, config.context_tokens)):  # whole and, if that is long enough, cut
        for num_queries in range(1, _CHUNK + 1):
            for queries in ([num_queries], [_CHUNK, num_queries]):
                yield _plan(model, config, queries, length, device)
        if may_share(model, config) and length > MIN_TOKENS:
            group = PrefixGroup(tuple(range(MIN_MEMBERS)), MIN_TOKENS)
            yield _plan(model, config, [1] * MIN_MEMBERS, length, device, (group,))


def _plan(
    model: ModelConfig,
    config: EngineConfig,
    queries: list[int],
    length: int,
    device: torch.device,
    groups: tuple[PrefixGroup, ...] = (),
) -> AttentionPlan:
    """Sequences with so many queries each, all of one length."""
    attention = model.attention
    plan = plan_attention(
        torch.zeros(len(queries), ALIGNED, dtype=torch.int32, device=device),
        [sum(queries[:number]) for number in range(len(queries) + 1)],
        [length] * len(queries),
        block_size=config.block_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        sliding_window=attention.sliding_window,
        groups=groups,
    )
    return replace(plan, is_fixed=shapes_of(config).is_fixed)


def _attend(model: Decoder, kv: KVCache, config: EngineConfig) -> None:
    heads = model.config.attention.num_heads, model.config.attention.head_dim
    for plan in plans_of_prompts(model.config, config, model.embedding.device):
        queries = model.embedding.new_zeros(plan.num_tokens, *heads)
        model.layers[0].attention.attend(queries, plan, kv)


def _steps_by_hand(model: Decoder, kv: KVCache, slots: LoraSlots, config: EngineConfig) -> None:
    """Those with more tokens than any graph."""
    shapes, device = shapes_of(config), model.embedding.device
    size = shapes.tokens[-1]
    while size < config.max_step_tokens:
        size = min(2 * size, config.max_step_tokens)
        numbers = torch.zeros(size, dtype=torch.int32, device=device)
        attention = _plan(model.config, config, [size], size, device)
        for rank, has_experts in shapes.forms:
            lora = plan_sgmv([0] * size, device) if rank else None
            batch = Batch(numbers, numbers, numbers - 1, attention, lora, numbers)
            model.forward(batch, kv, slots, rank, has_experts=has_experts)


def _sample(logits: Tensor) -> None:
    """logits [1, V] in the weights' dtype."""
    highest(logits)
    logits = logits.float()
    highest(logits)
    whole, fraction = torch.zeros(1, dtype=torch.int64, device=logits.device), logits[0, :1].contiguous()
    edit_logits(logits, Edits(whole, whole, fraction, fraction, fraction))
    sample(logits, SamplingRows(fraction, whole.int(), fraction, fraction, fraction))
