"""engine/gpu/rehearsal: what any step of a GPU launches has been rehearsed. Nothing is compiled or launched here:
tensors of a CPU go the way of a GPU's, as far as the compiler."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from triton.runtime import driver

from engine.batch import Batch
from engine.config import EngineConfig
from engine.gpu.rehearsal import rehearse
from engine.gpu.shapes import in_one_shape
from engine.models.attention import KVCache
from engine.models.config import AttentionConfig, ModelConfig, module_sizes
from engine.models.decoder import Decoder
from engine.models.lora_slots import ExpertSlots, LoraSlots
from engine.weights.adapter import AdapterWeights, LoraPair
from kernels.ahead import Job, rehearsal
from kernels.paged_attention import PrefixGroup, plan_attention
from kernels.sampling import Edits, SamplingRows, edit_logits, highest, sample
from kernels.sgmv import plan_sgmv
from kernels.upload import ALIGNED
from tests.hopper import Hopper
from tests.tiny import tiny_config, tiny_weights
from tests.tiny_moe import MOE, expert_adapter, moe_weights
from tests.tiny_steps import adapter_weights

CONTEXT = 4096
SIZES = EngineConfig(
    num_blocks=8,
    block_size=16,
    context_tokens=CONTEXT,
    max_step_tokens=3000,
    max_running=64,
    adapter_slots=4,
    max_lora_rank=64,
)
DENSE = replace(tiny_config(), attention=AttentionConfig(8, 1, 8))  # heads enough for every size of program


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


class Stage:
    """A tiny model of bf16 and its pools, on a CPU."""

    def __init__(self, sizes: EngineConfig = SIZES, model: ModelConfig = DENSE) -> None:
        weights = moe_weights(model) if model.moe else tiny_weights(config=model)
        self.sizes = sizes
        self.model = Decoder(model, {name: weight.bfloat16() for name, weight in weights.items()})
        self.model.keep_choices(sizes.max_step_tokens)
        self.kv = KVCache(model, sizes.num_blocks, sizes.block_size, self.model.embedding)
        experts = ExpertSlots(sizes.expert_adapter_slots or 0, sizes.max_expert_rank)
        self.slots = LoraSlots(model, sizes.adapter_slots, sizes.max_lora_rank, self.model.embedding, True, experts)

    def load(self, slot: int, lora_rank: int, modules: list[str]) -> None:
        sizes = {module: module_sizes(self.model.config)[module] for module in modules}
        pairs = {
            (layer, module): LoraPair(torch.zeros(lora_rank, size_in), torch.zeros(size_out, lora_rank), 1.0)
            for layer in (0, 1)
            for module, (size_in, size_out) in sizes.items()
        }
        self.slots.load_slot(slot, AdapterWeights(pairs, 0))

    @contextmanager
    def noted(self) -> Iterator[set[Job]]:
        jobs: set[Job] = set()
        with rehearsal(jobs.add), torch.inference_mode():
            yield jobs

    def attend(self, queries: list[int], lengths: list[int], groups: tuple[PrefixGroup, ...] = ()) -> set[Job]:
        attention = self.model.config.attention
        plan = plan_attention(
            torch.zeros(len(queries), random.randrange(1, 9) * ALIGNED, dtype=torch.int32),
            [sum(queries[:number]) for number in range(len(queries) + 1)],
            lengths,
            block_size=self.sizes.block_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            sliding_window=attention.sliding_window,
            groups=groups,
        )
        plan = replace(plan, is_fixed=self.sizes.deterministic)
        x = self.model.embedding.new_zeros(plan.num_tokens, attention.num_heads, attention.head_dim)
        with self.noted() as jobs:
            self.model.layers[1].attention.attend(x, plan, self.kv)
        return jobs

    def forward(self, num_tokens: int, slots: list[int]) -> set[Job]:
        numbers = torch.zeros(num_tokens, dtype=torch.int32)
        attention = self.model.config.attention
        plan = plan_attention(
            torch.zeros(1, ALIGNED, dtype=torch.int32),
            [0, num_tokens],
            [num_tokens],
            block_size=self.sizes.block_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
        )
        lora = plan_sgmv(slots, numbers.device) if max(slots) >= 0 else None
        with self.noted() as jobs:
            self.model.forward(Batch(numbers, numbers, numbers, plan, lora, numbers), self.kv, self.slots)
        return jobs


@lru_cache
def rehearsed(sizes: EngineConfig = SIZES, model: ModelConfig = DENSE) -> set[Job]:
    stage = Stage(sizes, model)
    with stage.noted() as jobs:
        rehearse(stage.model, stage.kv, stage.slots, sizes)
    assert not any(part.any() for parts in (stage.kv.keys, stage.kv.values) for part in parts)
    return jobs


def test_attention_of_any_mix_of_prompts_and_decodes_was_rehearsed():
    stage, draw = Stage(), random.Random(1)

    for _ in range(60):
        queries = [
            draw.choice((1, 1, 1, draw.randrange(1, 10), draw.randrange(10, 300)))
            for _ in range(draw.choice((1, 2, 9, 40)))
        ]
        lengths = [draw.choice((count, count + 5, CONTEXT)) for count in queries]

        assert stage.attend(queries, lengths) <= rehearsed(stage.sizes), (queries, lengths)


def test_decodes_that_read_their_beginning_together_beside_a_prompt_were_rehearsed():
    stage, draw = Stage(), random.Random(2)

    for others in ([], [1], [4], [200], [1, 200]):
        lengths = [draw.randrange(600, 2000) for _ in range(8)] + [max(300, count) for count in others]
        groups = (PrefixGroup((0, 1, 2), 256), PrefixGroup((3, 4, 5, 6), 512))

        assert stage.attend([1] * 8 + others, lengths, groups) <= rehearsed(stage.sizes), others


def test_a_deterministic_engines_attention_was_rehearsed():
    stage, draw = Stage(in_one_shape(replace(SIZES, deterministic=True))), random.Random(3)

    for _ in range(20):
        queries = [draw.choice((1, draw.randrange(1, 60))) for _ in range(draw.choice((1, 3, 9)))]

        assert stage.attend(queries, [draw.choice((count, CONTEXT)) for count in queries]) <= rehearsed(stage.sizes), (
            queries
        )


@pytest.mark.parametrize("lora_rank", [1, 16, 20, 64])
def test_steps_too_large_for_a_graph_were_rehearsed_whatever_their_adapters(lora_rank: int):
    stage = Stage()
    stage.load(1, lora_rank, ["k_proj"])
    stage.load(2, lora_rank, list(module_sizes(stage.model.config)))

    for num_tokens in (1025, 1040, 2047, 2048, 2999):
        for slot, others in ((-1, -1), (1, 1), (2, -1), (-1, 1), (1, 2)):
            slots = [slot] * 3 + [others] * (num_tokens - 3)

            assert stage.forward(num_tokens, slots) <= rehearsed(stage.sizes), (num_tokens, slot, others)


def test_large_steps_of_a_model_with_experts_were_rehearsed():
    stage = Stage(model=MOE["qwen2_moe"])
    stage.load(1, 8, ["q_proj"])

    for num_tokens in (1025, 1536, 2048, 2999):
        for slot in (-1, 1):
            assert stage.forward(num_tokens, [slot] * num_tokens) <= rehearsed(model=MOE["qwen2_moe"])


@pytest.mark.parametrize("lora_rank", [3, 16])
def test_large_steps_with_adapters_on_experts_were_rehearsed(lora_rank: int):
    model, sizes = MOE["qwen2_moe"], replace(SIZES, expert_adapter_slots=2)
    stage = Stage(sizes, model)
    stage.load(1, 8, ["q_proj"])
    adapter = expert_adapter(model, 1, rank=lora_rank, parts=("up_proj", "down_proj"), experts=(0, 3))
    stage.slots.load_slot(0, adapter_weights(adapter))
    known, parts = rehearsed(sizes, model), set()

    for num_tokens in (1025, 1536, 2048, 2999):
        for slots in ([0] * num_tokens, [-1, 0, 1] + [1] * (num_tokens - 3)):
            jobs = stage.forward(num_tokens, slots)
            assert jobs <= known, (num_tokens, slots[:3])
            parts |= {name for _, name, _ in jobs}
    assert "_cut" in parts
    assert "_cut" not in {name for _, name, _ in stage.forward(1025, [1] * 1025)}, "launched for nobody"


@pytest.mark.parametrize("num_rows", [1, 7, 48])
def test_draws_were_rehearsed(num_rows: int):
    stage = Stage()
    logits, numbers = torch.zeros(num_rows, stage.model.config.vocab_size), torch.zeros(num_rows)
    edited = torch.zeros(3 * num_rows)

    with stage.noted() as jobs:
        highest(logits)
        highest(logits.bfloat16())
        edit_logits(logits, Edits(edited.long(), edited.long(), edited, edited, edited))
        sample(logits, SamplingRows(numbers, numbers.int(), numbers, numbers, numbers))

    assert jobs <= rehearsed()
