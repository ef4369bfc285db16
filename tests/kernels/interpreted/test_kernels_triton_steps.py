"""A captured step of a model with experts, computed under Triton's interpreter by what a graph would hold: tensors of a
CPU go the way of a GPU's."""

import pytest
import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.gpu.decode_graphs import DecodeGraphs, Step
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from engine.scheduler import Chunk, StepPlan
from kernels.testing import assert_matches_reference
from tests.tiny_moe import MOE, moe_adapters, moe_weights
from tests.tiny_steps import adapter_weights, make_plan, make_sequence

MODEL = MOE["qwen2_moe"]  # dense layers between, a shared expert
SIZES = EngineConfig(
    num_blocks=64,
    block_size=16,
    context_tokens=256,
    max_step_tokens=64,
    max_running=8,
    adapter_slots=4,
    max_lora_rank=16,
)
PROMPTS = (([5, 6, 7, 8, 9, 10, 11], -1), ([3, 4, 5] * 4, 0), ([9, 8, 7], 1), ([20, 21, 22], -1), ([30] * 5, 2))


class Stage:
    """The model, its pools, and sequences whose prompts are computed: ``logits`` are of their last tokens."""

    def __init__(self, *, is_static: bool) -> None:
        self.model = Decoder(MODEL, moe_weights(MODEL))
        self.kv = KVCache(MODEL, SIZES.num_blocks, SIZES.block_size, self.model.embedding)
        self.slots = LoraSlots(
            MODEL, SIZES.adapter_slots, SIZES.max_lora_rank, self.model.embedding, is_static=is_static
        )
        for slot, adapter in enumerate(list(moe_adapters(MODEL).values())[:3]):
            of_attention = {place: pair for place, pair in adapter.items() if not place[1].startswith("experts.")}
            self.slots.load_slot(slot, adapter_weights(of_attention))
        if is_static:
            self.model.keep_choices(SIZES.max_step_tokens)
        self.sequences = [make_sequence(tokens, [10 + row], slot) for row, (tokens, slot) in enumerate(PROMPTS)]
        self.logits = self.launched(self.plan(0))

    def plan(self, num_computed: int | None = None) -> StepPlan:
        """The tokens from there on, by default the last."""
        firsts = [len(one.token_ids) - 1 if num_computed is None else num_computed for one in self.sequences]
        return make_plan(
            [
                Chunk(one, first, len(one.token_ids) - first, samples=True, scores=False)
                for one, first in zip(self.sequences, firsts, strict=True)
            ]
        )

    def draw(self) -> None:
        for number, sequence in enumerate(self.sequences):
            sequence.token_ids.append(40 + number)

    def launched(self, plan: StepPlan) -> Tensor:
        batch = build_batch(plan, SIZES.block_size, MODEL.attention, self.model.embedding.device)
        hidden = self.model.forward(batch, self.kv, self.slots)
        return self.model.logits(hidden.index_select(0, batch.logits_rows))

    def captured(self, plan: StepPlan) -> Tensor:
        """In a step of eight."""
        graphs = DecodeGraphs(self.model, self.kv, self.slots, torch.zeros(8, dtype=torch.int64), SIZES, None)
        kind = graphs._kind(plan, has_groups=False)
        assert kind.size == 8
        graphs._tables.update(plan.chunks)
        layout = graphs._layouts[kind.size, False]
        numbers = graphs._numbers.begin(layout.places)
        layout.fill(numbers, Step(plan.chunks, {}), self.slots.num_slots, with_lora=True)
        graphs._numbers.send()
        tables = graphs._tables.tables[: kind.size]
        batch = layout.batch(graphs._numbers.memory, tables, self.slots.num_slots, kind.rank)
        return graphs._compute(batch, kind.rank)[: len(plan.chunks)].float()

    def uses(self) -> Tensor:
        return self.model.expert_uses(torch.arange(len(PROMPTS)), len(PROMPTS))


@torch.inference_mode()
def test_decodes_with_experts_and_adapters_in_a_step_that_is_filled_up_are_those_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
):
    plain = Stage(is_static=False)
    plain.draw()
    expected, uses = plain.launched(plain.plan()), plain.uses()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    stage = Stage(is_static=True)
    stage.draw()

    found = stage.captured(stage.plan())

    assert_matches_reference(stage.logits, plain.logits.double())
    assert_matches_reference(found, expected.double())
    assert torch.equal(stage.uses(), uses)
    assert stage.model.expert_tokens() == plain.model.expert_tokens()
