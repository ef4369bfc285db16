"""Runs one step on the device: one forward for all chunks, then tokens and log-probabilities where wanted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch, build_batch
from engine.config import EngineConfig
from engine.device_counters import DeviceCounters
from engine.experts import ExpertLoad
from engine.flight import Computed, StepHandle
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots, PackedAdapter
from engine.sampler import Sampled, Sampler
from engine.scheduler import Chunk, ChunkResult, StepPlan
from engine.weights.adapter import AdapterWeights
from engine.wire import TokenLogprobs

SCORE_ROWS = 64  # logits of a long prompt are made for so many positions at a time: bounds the memory


@dataclass(frozen=True, slots=True)
class ModelInfo:
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Runner:
    """Owns the KV pool and the adapter slots of one model. Not thread-safe: the step thread's."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self.model_info = ModelInfo(model.config.vocab_size, model.config.eos_token_ids)
        self._model = model
        self._block_size = config.block_size
        self.kv = KVCache(model.config, config.num_blocks, config.block_size, model.embedding)
        self.slots = LoraSlots(model.config, config.adapter_slots, config.max_lora_rank, model.embedding)
        self._sampler = Sampler(model.config.eos_token_ids)
        moe = model.config.moe
        self.expert_load = ExpertLoad(moe.layers, model.expert_tokens) if moe else None
        self.device_counters: DeviceCounters | None = None

    @property
    def num_linear_calls(self) -> int:
        """Products with base weights so far."""
        return self._model.num_linear_calls

    overlaps = False

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Computes the plan."""
        batch = build_batch(plan, self._block_size, self._model.config.attention, self._model.embedding.device)
        hidden = self._model.forward(batch, self.kv, self.slots)
        sampled = iter(self._sample(plan, batch, hidden))
        results = []
        for chunk, start in zip(plan.chunks, batch.attention.query_starts[:-1], strict=True):
            token_id, logprobs = next(sampled) if chunk.samples else (-1, None)
            scores = self._score(chunk, hidden[start : start + chunk.num_tokens]) if chunk.scores else ()
            results.append(ChunkResult(token_id, logprobs, scores))
        return Computed(results)

    def prepare(self, weights: AdapterWeights) -> AdapterWeights | PackedAdapter:
        """What ``load_slot`` takes fastest; from any thread, beside the steps."""
        return self.slots.prepare(weights)

    @torch.inference_mode()
    def load_slot(self, slot: int, weights: AdapterWeights | PackedAdapter) -> None:
        """Replaces what ``slot`` holds. Raises InvalidAdapter for one that does not fit the model or the slots."""
        self.slots.load_slot(slot, weights)

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zeroes ``slot``."""
        self.slots.clear_slot(slot)

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> list[Sampled]:
        rows = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if not rows:
            return []
        return self._sampler.sample(self._model.logits(hidden.index_select(0, batch.logits_rows)), rows)

    def _score(self, chunk: Chunk, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """hidden [tokens of the chunk, H] → log-probabilities of the prompt tokens that they predict."""
        sequence, targets = chunk.sequence, scored_tokens(chunk)
        scores: list[TokenLogprobs] = []
        for first in range(0, len(targets), SCORE_ROWS):
            some = targets[first : first + SCORE_ROWS]
            logits = self._model.logits(hidden[first : first + len(some)])
            scores += self._sampler.score(logits, some, sequence.sampling.prompt_logprobs)
        return tuple(scores)


def scored_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens that a chunk's positions predict."""
    sequence = chunk.sequence
    return sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
