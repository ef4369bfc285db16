"""Runs one step on the device: one forward for all chunks, then tokens and log-probabilities where wanted."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, build_batch, on_device
from engine.config import EngineConfig
from engine.experts import ExpertLoad
from engine.flight import Computed, StepHandle
from engine.gpu.op_clock import OpClock
from engine.metering.device_counters import TIMED_STEPS, DeviceCounters
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.lora_slots import ExpertSlots, LoraSlots
from engine.models.lora_transfer import PackedAdapter
from engine.models.moe import shared_evenly
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

    def __init__(self, model: Decoder, config: EngineConfig, peak_bytes_s: float = 0.0) -> None:
        self.model_info = ModelInfo(model.config.vocab_size, model.config.eos_token_ids)
        self._model = model
        self._block_size = config.block_size
        self.kv = KVCache(model.config, config.num_blocks, config.block_size, model.embedding)
        experts = ExpertSlots(config.expert_adapter_slots or 0, config.max_expert_rank)
        self.slots = LoraSlots(
            model.config, config.adapter_slots, config.max_lora_rank, model.embedding, experts=experts
        )
        self._sampler = Sampler(model.config.eos_token_ids)
        moe = model.config.moe
        self.expert_load = ExpertLoad(moe.layers, model.expert_tokens) if moe else None
        self.device_counters = DeviceCounters(peak_bytes_s)
        self.time_ops(TIMED_STEPS)
        attention = model.config.attention
        self._token_bytes = 2 * model.config.num_layers * attention.num_kv_heads * attention.head_dim * self.kv.itemsize

    def time_ops(self, every: int) -> None:
        """From now on, on one step in ``every``."""
        self._clock = OpClock(self.device_counters.op_ns, self._model.embedding.device, every)

    @property
    def num_linear_calls(self) -> int:
        """Products with base weights so far."""
        return self._model.num_linear_calls

    overlaps = False

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Computes the plan."""
        self.device_counters.num_bytes += self._least_bytes(plan)
        self.device_counters.shapes[_shape(plan)] += 1
        with self._clock.step():
            return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepHandle:
        batch = build_batch(plan, self._block_size, self._model.config.attention, self._model.embedding.device)
        hidden = self._model.forward(batch, self.kv, self.slots)
        sampled = iter(self._sample(plan, batch, hidden))
        results = []
        for chunk, start in zip(plan.chunks, batch.attention.query_starts[:-1], strict=True):
            token_id, logprobs = next(sampled) if chunk.samples else (-1, None)
            scores = self._score(chunk, hidden[start : start + chunk.num_tokens]) if chunk.scores else ()
            results.append(ChunkResult(token_id, logprobs, scores))
        parts = self._expert_parts(plan)
        return Computed(results, None if parts is None else parts.numpy())

    def _expert_parts(self, plan: StepPlan) -> Tensor | None:
        """[chunks] as of a StepHandle, on the device, of the step just computed."""
        if self.expert_load is None:
            return None
        owners = np.repeat(np.arange(len(plan.chunks)), [chunk.num_tokens for chunk in plan.chunks])
        (owners,) = on_device(self._model.embedding.device, owners)
        return shared_evenly(self._model.expert_uses(owners, len(plan.chunks)))

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

    def _least_bytes(self, plan: StepPlan) -> int:
        """What a step must move: the weights once, the keys and values that its chunks see or write, its adapters."""
        seen = sum(chunk.end for chunk in plan.chunks)
        slots = {chunk.sequence.adapter_slot for chunk in plan.chunks}
        adapters = sum(self.slots.num_bytes(slot) for slot in slots if slot >= 0)
        return self._model.num_bytes + seen * self._token_bytes + adapters

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


def _shape(plan: StepPlan) -> str:
    """A CPU computes any size as it is; told is the next power of two."""
    kind = "decode" if plan.num_tokens == len(plan.chunks) else "tokens"
    return f"{kind} {1 << (plan.num_tokens - 1).bit_length()}"


def scored_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens that a chunk's positions predict."""
    sequence = chunk.sequence
    return sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
