"""engine/models: the decoder against an oracle that shares no code with it, and its exactness to the bit."""

import random

import pytest
import torch
import torch.nn.functional as F

from engine.errors import InvalidAdapter
from engine.models.attention import inverse_frequencies
from engine.models.config import MODULES, Llama3Scaling, ModelConfig, RopeConfig
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from engine.weights.adapter import AdapterWeights, LoraPair
from tests.tiny import merged, tiny_adapter, tiny_config, tiny_weights, weight_name
from tests.tiny_steps import Steps, adapter_weights

DTYPES = [torch.float32, torch.bfloat16]
ADAPTERS = (
    tiny_adapter(1, rank=4),
    tiny_adapter(2, rank={"q_proj": 4, "v_proj": 8}, modules=("q_proj", "v_proj")),
    tiny_adapter(3, rank=16, modules=("gate_proj", "down_proj")),
    tiny_adapter(4, rank=1, modules=("q_proj", "k_proj", "o_proj"), layers=(1,)),
)
CONFIGS = {
    "untied": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "biases": tiny_config(attention_bias=True),
    "window": tiny_config(sliding_window=40),
}


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 300), k=length)


def oracle(config: ModelConfig, weights: dict, tokens: list[int]) -> torch.Tensor:
    """A Llama of complex numbers and whole matrices in float64: logits [T, V]."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    heads, kv_heads, dim = config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim
    positions = torch.arange(len(tokens)).double()
    angles = torch.outer(positions, config.rope.theta ** (-torch.arange(0, dim, 2).double() / dim))
    window = config.attention.sliding_window or len(tokens)
    distance = positions[:, None] - positions[None, :]
    seen = (distance >= 0) & (distance < window)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def project(x: torch.Tensor, layer: int, module: str) -> torch.Tensor:
        name = weight_name(layer, module)
        return x @ weights[name].T + weights.get(name.replace(".weight", ".bias"), 0.0)

    def turn(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        h = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q = turn(project(h, layer, "q_proj").unflatten(-1, (heads, dim)))
        k = turn(project(h, layer, "k_proj").unflatten(-1, (kv_heads, dim))).repeat_interleave(heads // kv_heads, 1)
        v = project(h, layer, "v_proj").unflatten(-1, (kv_heads, dim)).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weighed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        x = x + project(weighed.flatten(1), layer, "o_proj")
        h = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        x = x + project(F.silu(project(h, layer, "gate_proj")) * project(h, layer, "up_proj"), layer, "down_proj")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


def assert_same_distribution(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Log-probabilities within 1e-4."""
    difference = (logits.double().log_softmax(-1) - expected.log_softmax(-1)).abs().max()
    assert difference <= 1e-4, difference


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_equal_the_oracle(config: ModelConfig):
    weights, tokens = tiny_weights(config=config), prompt_of(150)

    logits = Steps(Decoder(config, weights)).prefill([(tokens, -1)])[0]

    assert logits.dtype == torch.float32
    assert_same_distribution(logits, oracle(config, weights, tokens))


@pytest.mark.parametrize("number", range(len(ADAPTERS)))
def test_an_adapter_equals_its_merged_weights(number: int):
    weights, tokens, adapter = tiny_weights(), prompt_of(70), ADAPTERS[number]
    steps = Steps(Decoder(tiny_config(), weights), ADAPTERS)

    logits = steps.prefill([(tokens, number)])[0]

    expected = oracle(tiny_config(), merged({name: w.double() for name, w in weights.items()}, adapter), tokens)
    assert_same_distribution(logits, expected)
    assert (expected - oracle(tiny_config(), weights, tokens)).abs().max() > 0.1  # it does something


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_has_the_bits_of_its_solo_run_in_mixed_batches(dtype):
    """Base and four adapters of other ranks and targets; 1 … 8 sequences, prefills beside decodes."""
    decoder = Decoder(tiny_config(), tiny_weights(dtype=dtype))
    prompts = [
        (prompt_of(length, i), (-1, 0, 1, 2, 3)[i % 5])
        for i, length in enumerate((1, 2, 5, 16, 17, 33, 130, 9, 40, 3, 64, 21))
    ]
    solo = [Steps(decoder, ADAPTERS).prefill([prompt])[0] for prompt in prompts]
    rng = random.Random(3)

    for count in (2, 3, 5, 8, 8, 12):
        chosen = rng.sample(range(len(prompts)), count)
        cuts = [rng.choice((0, len(prompts[i][0]) - 1, len(prompts[i][0]) // 2)) for i in chosen]
        steps = Steps(decoder, ADAPTERS)
        first = steps.run_parts([(*prompts[i], 0, cut) for i, cut in zip(chosen, cuts, strict=True) if cut])
        rest = steps.run_parts([(*prompts[i], cut, len(prompts[i][0])) for i, cut in zip(chosen, cuts, strict=True)])
        starts = iter(first)
        for i, cut, last in zip(chosen, cuts, rest, strict=True):
            rows = torch.cat((next(starts), last)) if cut else last
            assert torch.equal(rows, solo[i]), (i, cut, chosen)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot", [-1, 0])
def test_chunks_and_decodes_equal_the_prefill_in_one_shot(slot: int, dtype):
    decoder = Decoder(tiny_config(), tiny_weights(dtype=dtype))
    tokens = prompt_of(270)
    whole = Steps(decoder, ADAPTERS).prefill([(tokens, slot)])[0]

    for size in (4, 16, 31, 64, 256):
        steps = Steps(decoder, ADAPTERS)  # fresh blocks: nothing of an earlier cut is read
        spans = [(first, min(first + size, 270)) for first in range(0, 270, size)]
        rows = [steps.run_parts([(tokens, slot, *span)])[0] for span in spans]
        assert torch.equal(torch.cat(rows), whole), f"chunks of {size}"
    steps = Steps(decoder, ADAPTERS)
    steps.run_parts([(tokens, slot, 0, 120)])
    decoded = [steps.run_parts([(tokens, slot, n, n + 1)])[0] for n in range(120, 150)]
    assert torch.equal(torch.cat(decoded), whole[120:150])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_base_rows_have_the_bits_of_a_model_without_lora(dtype):
    decoder = Decoder(tiny_config(), tiny_weights(dtype=dtype))
    prompts = [(prompt_of(length), -1) for length in (1, 7, 33)]
    without = Steps(decoder).prefill(prompts)

    among = Steps(decoder, ADAPTERS).prefill([(prompt_of(9), 0), *prompts, (prompt_of(12), 3)])[1:4]

    assert all(torch.equal(a, b) for a, b in zip(among, without, strict=True))


def test_one_thread_and_two_give_the_same_bits():
    decoder, prompt = Decoder(tiny_config(), tiny_weights()), (prompt_of(90), 0)
    before = torch.get_num_threads()
    logits = []
    for num in (1, 2):
        torch.set_num_threads(num)
        logits.append(Steps(decoder, ADAPTERS).prefill([prompt])[0])
    torch.set_num_threads(before)

    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_and_slots_of_nobody_are_never_read(dtype):
    decoder = Decoder(tiny_config(), tiny_weights(dtype=dtype))
    prompts = [(prompt_of(30), -1), (prompt_of(150), 1), (prompt_of(5), 3)]
    clean = Steps(decoder, ADAPTERS).prefill(prompts)

    steps = Steps(decoder, ADAPTERS)
    for cache in (*steps.kv.keys, *steps.kv.values):
        cache.fill_(float("nan"))
    for slot in (0, 2):
        nan = {key: (a * float("nan"), b * float("nan"), s) for key, (a, b, s) in tiny_adapter(9, 8).items()}
        steps.slots.load_slot(slot, adapter_weights(nan))
    poisoned = steps.prefill(prompts)
    more = steps.run_parts([([*tokens, 7], slot, len(tokens), len(tokens) + 1) for tokens, slot in prompts])

    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert not any(rows.isnan().any() for rows in more)


def test_adapter_traffic_leaves_the_base_weights_bit_by_bit():
    weights = tiny_weights()
    decoder = Decoder(tiny_config(), weights)

    def fingerprint() -> list[torch.Tensor]:
        fused = [linear.weight.weight.clone() for layer in decoder.layers for linear in layer.linears()]
        return [*fused, decoder.head.weight.clone(), *(tensor.clone() for tensor in weights.values())]

    before = fingerprint()
    steps = Steps(decoder, ADAPTERS)
    for slot in (0, 1, 2, 3, -1):
        steps.prefill([(prompt_of(20), slot)])
    steps.slots.load_slot(0, adapter_weights(ADAPTERS[2]))
    steps.slots.clear_slot(1)
    steps.prefill([(prompt_of(20, 5), 0)])

    assert all(torch.equal(a, b) for a, b in zip(before, fingerprint(), strict=True))


def test_a_cleared_or_replaced_slot_keeps_nothing_of_its_adapter():
    decoder, prompt = Decoder(tiny_config(), tiny_weights()), prompt_of(20)
    base = Steps(decoder).prefill([(prompt, -1)])[0]
    fourth = Steps(decoder, ADAPTERS).prefill([(prompt, 3)])[0]
    steps = Steps(decoder, ADAPTERS)

    steps.slots.load_slot(0, adapter_weights(ADAPTERS[3]))
    steps.slots.clear_slot(1)
    replaced, cleared = steps.prefill([(prompt, 0), (prompt, 1)])

    assert torch.equal(replaced, fourth)
    assert torch.equal(cleared, base)


def pair(lora_rank: int, num_in: int, num_out: int) -> LoraPair:
    return LoraPair(torch.ones(lora_rank, num_in), torch.ones(num_out, lora_rank), 1.0)


@pytest.mark.parametrize(
    ("place", "bad", "named"),
    [
        ((2, "q_proj"), pair(4, 32, 32), "layer 2"),
        ((0, "lm_head"), pair(4, 32, 300), "lm_head"),
        ((0, "k_proj"), pair(4, 32, 32), "fit"),
        ((0, "q_proj"), pair(17, 32, 32), "rank 17"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_leaves_the_slot_empty(place, bad: LoraPair, named: str):
    decoder, prompt = Decoder(tiny_config(), tiny_weights()), prompt_of(8)
    steps = Steps(decoder, ADAPTERS)
    good = pair(4, 32, 32)

    with pytest.raises(InvalidAdapter, match=named):
        steps.slots.load_slot(0, AdapterWeights({(0, "o_proj"): good, place: bad}, 0))

    base = Steps(decoder).prefill([(prompt, -1)])[0]
    assert torch.equal(steps.prefill([(prompt, 0)])[0], base)


def test_memory_is_taken_only_for_modules_that_some_adapter_has():
    slots = LoraSlots(tiny_config(), 4, 16, torch.zeros(1))
    slots.load_slot(2, adapter_weights(ADAPTERS[1]))

    present = [(layer, module) for layer in range(2) for module in MODULES if slots.slices(layer, (module,))]

    assert present == [(layer, module) for layer in range(2) for module in ("q_proj", "v_proj")]


def test_llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    plain = inverse_frequencies(RopeConfig(5e5), 128)

    stretched = inverse_frequencies(RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128)

    wavelengths = 2 * torch.pi / plain
    assert torch.equal(stretched[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    torch.testing.assert_close(stretched[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6, atol=0.0)
    between = (wavelengths >= 8192 / 4) & (wavelengths <= 8192)
    assert ((stretched <= plain) & (stretched >= plain / 8))[between].all()


# ── slots as graphs need them ────────────────────────────────────────────────────────────────────


def static_slots() -> LoraSlots:
    return LoraSlots(tiny_config(), 3, 16, torch.zeros(1), is_static=True)


def contents(slots: LoraSlots, slot: int) -> list[torch.Tensor]:
    """All memory of a slot, and its column of ranks."""
    slices = [slots.captured_slices(layer, (module,), 16)[0] for layer in range(2) for module in MODULES]
    ranks = torch.stack([part.rank_table[slot] for part in slices if part.rank_table is not None])
    return [ranks, *(tensor[slot] for part in slices for tensor in (part.a, part.b))]


@pytest.mark.parametrize("before", [None, 1])
def test_a_packed_adapter_leaves_the_same_in_its_slot_as_one_that_is_not(before: int | None):
    plain, packed = static_slots(), static_slots()
    if before is not None:  # another one, of a higher rank and other modules
        packed.load_slot(1, packed.prepare(adapter_weights(tiny_adapter(before, rank=16))))
    weights = adapter_weights(ADAPTERS[1])

    plain.load_slot(1, weights)
    packed.load_slot(1, packed.prepare(weights))

    assert not isinstance(packed.prepare(weights), AdapterWeights)
    for one, other in zip(contents(plain, 1), contents(packed, 1), strict=True):
        assert torch.equal(one, other)


def test_the_table_has_the_true_ranks_and_one_slot_more_that_stays_empty():
    slots = static_slots()
    slots.load_slot(2, slots.prepare(adapter_weights(tiny_adapter(1, rank=4))))
    ranks = contents(slots, 2)[0]
    assert set(ranks.tolist()) == {4}
    assert slots.lora_rank(2) == 4

    slots.clear_slot(2)

    assert not any(part.any() for part in contents(slots, 2))
    assert slots.lora_rank(2) == 0
    part = slots.captured_slices(0, ("q_proj",), 16)[0]
    assert part.rank_table is not None
    assert part.rank_table.tolist() == [0, 0, 0, 0]


def test_static_slots_compute_what_others_do():
    decoder, prompt = Decoder(tiny_config(), tiny_weights()), prompt_of(9)
    plain, static = Steps(decoder, ADAPTERS[:2]), Steps(decoder, ADAPTERS[:2])
    static.slots = LoraSlots(tiny_config(), 4, 16, decoder.embedding, is_static=True)
    for slot, adapter in enumerate(ADAPTERS[:2]):
        static.slots.load_slot(slot, static.slots.prepare(adapter_weights(adapter)))

    for slot in (-1, 0, 1):
        assert torch.equal(static.prefill([(prompt, slot)])[0], plain.prefill([(prompt, slot)])[0])


def test_weights_that_do_not_fit_are_not_packed_and_refused_when_they_are_loaded():
    slots = static_slots()
    bad = slots.prepare(AdapterWeights({(0, "o_proj"): pair(4, 32, 31)}, 0))

    with pytest.raises(InvalidAdapter):
        slots.load_slot(0, bad)
