"""Runs a decoder step by step without scheduler or sampler: parts of token lists in, logits of every row out."""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from engine.scheduler import Chunk, StepPlan
from engine.sequence import Request, Sequence
from engine.weights.adapter import AdapterWeights, LoraPair
from engine.wire import Flow, SamplingParams, Submit
from tests.tiny import Adapter

BLOCK_SIZE = 4


def adapter_weights(adapter: Adapter) -> AdapterWeights:
    pairs = {place: LoraPair(a, b, scale) for place, (a, b, scale) in adapter.items()}
    return AdapterWeights(pairs, sum(a.nbytes + b.nbytes for a, b, _ in adapter.values()))


def make_sequence(
    tokens: list[int], blocks: list[int], slot: int = -1, num_prompt_tokens: int = 0, **sampling
) -> Sequence:
    """A running sequence; its prompt is all of ``tokens`` unless ``num_prompt_tokens`` is given."""
    params = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **sampling})
    submit = Submit("r", [], params, Flow("f"), b"", 64)
    sequence = Sequence(0, Request(submit, 0), 0, tokens[: num_prompt_tokens or len(tokens)], seed=1)
    sequence.token_ids = list(tokens)
    sequence.block_table = blocks
    sequence.adapter_slot = slot
    return sequence


def make_plan(chunks: Many[Chunk]) -> StepPlan:
    return StepPlan(chunks=tuple(chunks), preempted=(), num_tokens=sum(chunk.num_tokens for chunk in chunks))


class Steps:
    """A KV pool and adapter slots for one decoder; slot i holds ``adapters[i]``. Blocks go in a scattered order."""

    def __init__(self, decoder: Decoder, adapters: Many[Adapter] = (), num_blocks: int = 256) -> None:
        self.decoder = decoder
        self.kv = KVCache(decoder.config, num_blocks, BLOCK_SIZE, decoder.embedding)
        self.slots = LoraSlots(decoder.config, 4, 16, decoder.embedding)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
        self._blocks: dict[tuple, list[int]] = {}
        for slot, adapter in enumerate(adapters):
            self.slots.load_slot(slot, adapter_weights(adapter))

    def prefill(self, prompts: Many[tuple[list[int], int]]) -> list[Tensor]:
        """(tokens, slot) each, whole and in one step → logits [T, V] each."""
        return self.run_parts([(tokens, slot, 0, len(tokens)) for tokens, slot in prompts])

    @torch.inference_mode()
    def run_parts(self, parts: Many[tuple[list[int], int, int, int]]) -> list[Tensor]:
        """(tokens, slot, first position, end) each, in one step → logits [end - first, V] each.

        A sequence is known by its first tokens and slot: later parts continue in the blocks of earlier ones.
        """
        chunks = [self._chunk(*part) for part in parts]
        if not chunks:
            return []
        plan = make_plan(chunks)
        batch = build_batch(plan, BLOCK_SIZE, self.decoder.config.attention, self.decoder.embedding.device)
        logits = self.decoder.logits(self.decoder.forward(batch, self.kv, self.slots))
        return list(logits.split([chunk.num_tokens for chunk in plan.chunks]))

    def _chunk(self, tokens: list[int], slot: int, first: int, end: int) -> Chunk:
        blocks = self._blocks.setdefault((tuple(tokens[:4]), slot), [])
        while len(blocks) * BLOCK_SIZE < end:
            blocks.append(self._free.pop())
        return Chunk(make_sequence(tokens, blocks, slot), first, end - first, samples=True, scores=False)
