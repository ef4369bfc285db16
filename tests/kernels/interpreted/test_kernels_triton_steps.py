"""A captured step of a model with experts, computed under Triton's interpreter by what a graph would hold: tensors of a
CPU go the way of a GPU's."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.gpu.decode_graphs import DecodeGraphs, Step
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.lora_slots import ExpertSlots, LoraSlots
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
    expert_adapter_slots=3,
)
PROMPTS = (([5, 6, 7, 8, 9, 10, 11], -1), ([3, 4, 5] * 4, 0), ([9, 8, 7], 1), ([20, 21, 22], -1), ([30] * 5, 2))


class Stage:
    """The model, its pools, and sequences whose prompts are computed: ``logits`` are of their last tokens."""

    def __init__(self, *, is_static: bool, prompts: Sequence[tuple[list[int], int]] = PROMPTS) -> None:
        self.model = Decoder(MODEL, moe_weights(MODEL))
        self.kv = KVCache(MODEL, SIZES.num_blocks, SIZES.block_size, self.model.embedding)
        sizes = SIZES.adapter_slots, SIZES.max_lora_rank
        experts = ExpertSlots(SIZES.expert_adapter_slots or 0, SIZES.max_expert_rank)
        self.slots = LoraSlots(MODEL, *sizes, self.model.embedding, is_static, experts)
        for slot, adapter in enumerate(list(moe_adapters(MODEL).values())[:3]):
            self.slots.load_slot(slot, self.slots.prepare(adapter_weights(adapter)))
        if is_static:
            self.model.keep_choices(SIZES.max_step_tokens)
        self.sequences = [make_sequence(tokens, [10 + row], slot) for row, (tokens, slot) in enumerate(prompts)]
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
        return graphs._compute(batch, kind)[: len(plan.chunks)].float()

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


@torch.inference_mode()
def test_rows_without_an_adapter_keep_their_bits_beside_adapters_on_experts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    beside, alone = (
        Stage(is_static=True, prompts=prompts) for prompts in (PROMPTS, [(tokens, -1) for tokens, _ in PROMPTS])
    )
    for stage in (beside, alone):
        stage.draw()
    base = [row for row, (_, slot) in enumerate(PROMPTS) if slot < 0]

    found, expected = (stage.captured(stage.plan()) for stage in (beside, alone))

    assert torch.equal(found[base], expected[base])
    assert not torch.equal(found, expected)


@torch.inference_mode()
def test_a_captured_step_has_the_bits_of_a_launched_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    prompts = [([*tokens, 1 + row], slot) for row, (tokens, slot) in enumerate(PROMPTS)] + [([7, 8], 1)] * 3
    stages = [Stage(is_static=True, prompts=prompts) for _ in range(2)]
    for stage in stages:
        stage.draw()

    assert torch.equal(stages[0].captured(stages[0].plan()), stages[1].launched(stages[1].plan()).float())
