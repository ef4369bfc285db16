"""The decoder with experts: against loops over tokens and experts, to the bit whatever shares a step, and counted."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidAdapter
from engine.metering.cost import EXPERT
from engine.models.config import MODULES, ModelConfig, UnsupportedConfig, from_hf, module_sizes
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from engine.models.moe import MoeMlp
from engine.runner import Runner
from engine.weights import UnsupportedModel, expected_shapes
from engine.weights.experts import fuse
from engine.wire import Flow, SamplingParams, Submit, pack_ids, unpack_ids
from tests.tiny import hf_config, tiny_adapter, tiny_config, tiny_weights
from tests.tiny_moe import MOE, PLAIN, expert_adapter, moe_adapters, moe_logits, moe_merged, moe_weights
from tests.tiny_steps import Steps, adapter_weights

DTYPES = [torch.float32, torch.bfloat16]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True)
MIXED = [("", 1), ("a", 2), ("", 5), ("b", 16), ("a", 17), ("", 33), ("c", 40), ("d", 130)]  # adapter, prompt length


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MOE)
def config(request) -> ModelConfig:
    return MOE[request.param]


def make_engine(config: ModelConfig, dtype: torch.dtype = torch.float32, **sizes) -> Engine:
    options = {"block_size": 4, "num_blocks": 512, "context_tokens": 512, "adapter_slots": 4, "max_lora_rank": 16}
    resolved = EngineConfig(**options | sizes)
    engine = Engine(resolved, Runner(Decoder(config, moe_weights(config, dtype=dtype)), resolved))
    for key, adapter in moe_adapters(config).items():
        engine.adapter_ready(key, adapter_weights(adapter))
    return engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(100 * seed + length).choices(range(3, 300), k=length)


def submit(name: str, prompt: list[int], adapter: str = "", sampling: SamplingParams = GREEDY) -> Submit:
    namespace = b"n" + adapter.encode()
    return Submit(name, [pack_ids(prompt)], sampling, Flow("f"), namespace, sampling.max_tokens, adapter_key=adapter)


def requests(order=None) -> list[Submit]:
    return [submit(f"r{i}", prompt_of(MIXED[i][1]), MIXED[i][0]) for i in order or range(len(MIXED))]


def run(engine: Engine, submits: list[Submit]) -> dict[str, tuple]:
    """All of them together to their ends: request → (tokens, log-probabilities, cached tokens), as they came."""
    tokens: dict[str, list] = {item.request_id: [] for item in submits}
    logprobs: dict[str, list] = {item.request_id: [] for item in submits}
    cached = {}
    for item in submits:
        engine.add(item)
    while engine.has_work:
        result = engine.step()
        assert not result.wanted
        for delta in result.deltas:
            tokens[delta.request_id] += unpack_ids(delta.token_ids)
            logprobs[delta.request_id] += delta.logprobs
        cached |= {finished.request_id: finished.usage.cached_tokens for finished in result.finished}
    return {name: (tuple(tokens[name]), tuple(logprobs[name]), cached[name]) for name in tokens}


# ── what it computes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_mixed_prompts_and_adapters_equal_loops_over_tokens_and_experts(config):
    weights, adapters = moe_weights(config), list(moe_adapters(config).values())
    prompts = [(prompt_of(length, 7), slot) for length, slot in ((3, -1), (40, 0), (1, 1), (17, 2), (25, 3), (9, -1))]

    given = Steps(Decoder(config, weights), adapters).prefill(prompts)

    for (prompt, slot), logits in zip(prompts, given, strict=True):
        reference = moe_merged(weights, adapters[slot]) if slot >= 0 else weights
        expected = moe_logits(config, reference, prompt)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)


def test_permuting_two_experts_but_not_the_router_changes_the_output(config):
    weights = moe_weights(config)
    swapped = dict(weights)
    order = [1, 0, *range(2, 8)]
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.1.mlp.experts.{name}"
        swapped[key] = weights[key][order]
    prompt = [(prompt_of(40), -1)]

    (plain,), (other,) = (Steps(Decoder(config, each)).prefill(prompt) for each in (weights, swapped))

    assert (plain - other).abs().max() > 0.1


def test_bf16_stays_near_fp32(config):
    """design.md §6, fed with the same tokens: mean |Δlogit| < 0.3."""
    prompts = [(prompt_of(length, 7), -1) for length in (3, 40, 17)]

    exact = torch.cat(Steps(Decoder(config, moe_weights(config))).prefill(prompts))
    rough = torch.cat(Steps(Decoder(config, moe_weights(config, dtype=torch.bfloat16))).prefill(prompts))

    assert (exact - rough).abs().mean() < 0.3
    assert (exact.argmax(-1) == rough.argmax(-1)).float().mean() > 0.8  # of a random model, whose margins are thin


# ── to the bit ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_of_a_mixed_batch_equals_its_solo_run_to_the_bit(config, dtype):
    solo = {}
    for request in requests():
        solo |= run(make_engine(config, dtype), [request])
    rng = random.Random(9)

    for num in (8, 8, 5, 3):
        order = rng.sample(range(len(MIXED)), num)
        together = run(make_engine(config, dtype), requests(order))
        assert together == {name: solo[name] for name in together}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_sizes_change_no_bit(config, dtype):
    prompts = [submit("x", prompt_of(130), "a"), submit("y", prompt_of(130, 1), "b")]
    beside = submit("z", prompt_of(3), "", SamplingParams(40, temperature=0.0, ignore_eos=True))
    whole = run(make_engine(config, dtype, max_step_tokens=512), prompts)

    for size in (4, 31, 64):
        cut = run(make_engine(config, dtype, max_step_tokens=size), [beside, *prompts])
        assert {name: cut[name] for name in whole} == whole, f"chunks of {size}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prefix_hit_equals_the_cold_run_to_the_bit(config, dtype):
    prompt = prompt_of(37)
    again = submit("x", [*prompt, 7, 8], "a")
    cold = run(make_engine(config, dtype), [again])["x"]
    engine = make_engine(config, dtype)
    run(engine, [submit("warm", prompt, "a")])

    warm = run(engine, [again])["x"]

    assert warm == (cold[0], cold[1], 36)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_threads_give_the_bits_of_one(config, dtype):
    brief = replace(GREEDY, max_tokens=3)
    items = [submit(f"t{i}", prompt_of(length), adapter, brief) for i, (adapter, length) in enumerate(MIXED[:7])]
    one = run(make_engine(config, dtype), items)
    torch.set_num_threads(2)

    assert run(make_engine(config, dtype), items) == one


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────


def test_adapters_leave_base_weights_and_base_answers_to_the_bit(config):
    weights = moe_weights(config)
    kept = {name: weight.clone() for name, weight in weights.items()}
    sizes = EngineConfig(block_size=4, num_blocks=512, context_tokens=512, adapter_slots=2)
    decoder = Decoder(config, weights)
    experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoeMlp)]
    matrices = [part.weight() for mlp in experts for part in (mlp.gate_up, mlp.down)]
    engine = Engine(sizes, Runner(decoder, sizes))
    for key, adapter in moe_adapters(config).items():
        engine.adapter_ready(key, adapter_weights(adapter))
    base = [item for item in requests() if not item.adapter_key]
    before = {name: answer[:2] for name, answer in run(engine, base).items()}

    adapted = run(engine, [item for item in requests() if item.adapter_key])

    assert {name: answer[:2] for name, answer in run(engine, base).items()} == before
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    after = [part.weight() for mlp in experts for part in (mlp.gate_up, mlp.down)]
    assert all(map(torch.equal, matrices, after))
    unadapted = run(make_engine(config), [replace(item, adapter_key="") for item in requests() if item.adapter_key])
    assert all(adapted[name][0] != unadapted[name][0] for name in adapted)  # they did something


def test_only_attention_takes_adapters_where_there_are_experts(config):
    assert list(module_sizes(config)) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert list(module_sizes(tiny_config())) == list(MODULES)


def test_an_adapter_of_a_dense_mlp_finishes_its_own_requests_with_an_error(config):
    engine = make_engine(config)
    engine.adapter_ready("mlp", adapter_weights(tiny_adapter(5, modules=("gate_proj",))))
    engine.add(submit("x", prompt_of(5), "mlp"))
    engine.add(submit("y", prompt_of(5)))

    finished = {}
    while engine.has_work:
        finished |= {each.request_id: each for each in engine.step().finished}

    assert finished["x"].error_code
    assert not finished["y"].error_code


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        (1, "experts.8.up_proj"),
        (1, "experts.up_proj"),
        (1, "experts.0.q_proj"),
        (2, "experts.0.up_proj"),
        (1, "experts"),
    ],
)
def test_an_expert_that_is_not_there_takes_no_adapter_and_nobody_elses_changes(config, layer: int, module: str):
    slots = LoraSlots(config, 2, 16, torch.zeros(1))
    (place, pair), *_ = expert_adapter(config, 1, rank=2, parts=("up_proj",)).items()
    slots.load_slot(1, adapter_weights({place: pair}))

    with pytest.raises(InvalidAdapter, match=module):
        slots.load_slot(0, adapter_weights({(layer, module): pair}))

    held = slots.slices(place[0], ("experts.up_proj",))[0]
    assert held.lora_ranks == (0,) * 8 + (2,) + (0,) * 7
    assert held.b[8, :2].any()
    assert not held.b[:8].any()


def test_a_slot_that_changes_hands_keeps_nothing_of_an_adapter_on_experts(config):
    slots = LoraSlots(config, 2, 16, torch.zeros(1))
    moe = config.moe
    slots.load_slot(1, adapter_weights(expert_adapter(config, 1, rank=5, parts=("gate_proj", "down_proj"))))
    assert slots.num_bytes(1) == 4 * 5 * 2 * 8 * len(moe.layers) * (config.hidden_size + moe.intermediate_size)

    slots.clear_slot(1)

    assert (slots.num_bytes(1), slots.lora_rank(1)) == (0, 0)
    assert not any(part.any() for pair in slots._pairs.values() for part in pair)
    assert slots.slices(moe.layers[0], ("experts.gate_proj",)) == []


# ── counts ───────────────────────────────────────────────────────────────────────────────────────


def test_each_real_token_is_counted_once_for_each_of_its_experts(config):
    """Products pad a lone row up to 4 and more; those rows are nobody's."""
    engine = make_engine(config)
    run(engine, [submit("x", prompt_of(9)), submit("y", prompt_of(1), "a")])

    assert config.moe is not None
    computed = 9 + 15 + 1 + 15  # prompts, and all but the last of 16 tokens each
    counts = engine.stats._experts.counts()
    assert [sum(layer) for layer in counts] == [config.moe.top_k * computed] * len(config.moe.layers)
    assert all(len(layer) == 8 for layer in counts)


def test_a_sequence_pays_alone_for_the_experts_that_it_alone_wakes_and_a_part_of_those_it_shares(config):
    """What each is sent to alone is what it is sent to beside others, to the bit."""
    items = [submit(f"r{number}", prompt_of(1 + number, number)) for number in range(3)]

    def experts_of(several: list[Submit]) -> tuple[list[set[int]], dict[str, int]]:
        engine = make_engine(config)
        engine._attribution.fit.coefficients = np.array([0.0] * EXPERT + [1e3])  # nothing else costs
        for item in several:
            engine.add(item)
        result = engine.step()
        woken = [{at for at, tokens in enumerate(layer) if tokens} for layer in engine.stats._experts.counts()]
        assert result.stats.num_sequences == len(several)
        return woken, {name: request.gpu_ns for name, request in engine._requests.items()}

    alone = [{(layer, at) for layer, used in enumerate(experts_of([item])[0]) for at in used} for item in items]
    woken, paid_ns = experts_of(items)

    expected = [sum(1 / sum(expert in other for other in alone) for expert in own) for own in alone]
    assert sum(map(len, woken)) == len(set.union(*alone)) == pytest.approx(sum(expected))
    assert len({round(part, 6) for part in expected}) > 1  # they are not all alike
    run_ns = sum(paid_ns.values())
    assert [paid_ns[item.request_id] / run_ns for item in items] == pytest.approx(
        [part / sum(expected) for part in expected], abs=1e-6
    )


def test_experts_kept_where_captured_steps_leave_them_are_those_of_the_last_step(config):
    engines = make_engine(config), make_engine(config)
    engines[1]._runner._model.keep_choices(64)
    for engine in engines:
        for number in range(3):
            engine.add(submit(f"r{number}", prompt_of(3 + number, number)))

    for num_tokens in (12, 3, 3):
        uses = []
        for engine in engines:
            engine.step()
            uses.append(engine._runner._model.expert_uses(torch.arange(num_tokens), num_tokens))
        assert torch.equal(*uses)
        assert uses[0].sum() == num_tokens * config.moe.top_k * len(config.moe.layers)


def test_two_runners_of_one_model_keep_its_choices_in_one_memory(config):
    model = Decoder(config, moe_weights(config))
    model.keep_choices(64)
    kept = [mlp.chosen.data_ptr() for mlp in model._expert_mlps()]

    model.keep_choices(32)

    assert [mlp.chosen.data_ptr() for mlp in model._expert_mlps()] == kept
    assert len(set(kept)) == len(config.moe.layers)


def test_the_load_of_experts_is_told_in_the_metrics(config):
    engine = make_engine(config)
    families = {family.name: family for family in engine.stats.families()}
    assert [value for _, _, value in families["tenora_expert_balancedness"].samples] == [1.0]
    run(engine, [submit("x", prompt_of(100))])

    families = {family.name: family for family in engine.stats.families()}

    ((_, _, even),) = families["tenora_expert_balancedness"].samples
    assert 1 / 8 <= even < 1
    told = {(int(at["layer"]), int(at["expert"])): n for _, at, n in families["tenora_expert_tokens"].samples}
    counts = dict(zip(config.moe.layers, engine.stats._experts.counts(), strict=True))
    assert told
    assert all(counts[layer][expert] == number for (layer, expert), number in told.items())
    assert max(told.values()) == max(map(max, counts.values()))


def test_a_dense_model_tells_of_no_experts():
    config = tiny_config()
    sizes = EngineConfig(block_size=4, num_blocks=8, context_tokens=32, adapter_slots=0)
    engine = Engine(sizes, Runner(Decoder(config, tiny_weights()), sizes))

    assert not [family.name for family in engine.stats.families() if "expert" in family.name]


def test_a_step_runs_one_forward_whatever_the_number_of_sequences(config):
    def calls(num: int) -> int:
        engine = make_engine(config)
        for i in range(num):
            engine.add(submit(f"r{i}", prompt_of(4, i), ("", "a", "b", "c")[i % 4]))
        before = engine._runner.num_linear_calls
        engine.step()
        return engine._runner.num_linear_calls - before

    assert calls(1) == calls(8) > 0


# ── names and configs ────────────────────────────────────────────────────────────────────────────


def classic(config: ModelConfig, weights: dict) -> dict:
    """The weights under the names that checkpoints have, one matrix an expert."""
    parent, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if config.family == "mixtral":
        parent, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    out = {}
    for name, weight in weights.items():
        prefix, _, last = name.partition(".mlp.")
        if last == "experts.gate_up_proj":
            for expert, pair in enumerate(weight):
                halves = zip((gate, up), pair.chunk(2), strict=True)
                out |= {f"{prefix}.{parent}.experts.{expert}.{module}.weight": half for module, half in halves}
        elif last == "experts.down_proj":
            out |= {f"{prefix}.{parent}.experts.{i}.{down}.weight": each for i, each in enumerate(weight)}
        else:
            out[f"{prefix}.{parent}.gate.weight" if last == "gate.weight" else name] = weight
    return out


def test_checkpoints_with_a_matrix_an_expert_and_fused_ones_are_the_same(config):
    weights = moe_weights(config)
    named = classic(config, weights)
    assert named.keys() != weights.keys()

    for each in (named, dict(weights)):
        fuse(config, each)
        assert each.keys() == weights.keys() == expected_shapes(config).keys()
        assert all(torch.equal(each[name], weights[name]) for name in weights)
        assert {name: tuple(weight.shape) for name, weight in each.items()} == expected_shapes(config)


def test_a_missing_expert_is_left_for_the_check_of_names(config):
    named = classic(config, moe_weights(config))
    missing = next(name for name in named if ".experts.7." in name)
    del named[missing]

    fuse(config, named)

    layer = missing.split(".")[2]
    assert f"model.layers.{layer}.mlp.experts.0.up_proj.weight" in named
    assert f"model.layers.{layer}.mlp.experts.gate_up_proj" not in named


def test_experts_of_different_shapes_are_refused(config):
    named = classic(config, moe_weights(config))
    name = next(name for name in named if ".experts.3." in name)
    named[name] = named[name][:-1]

    with pytest.raises(UnsupportedModel, match="different shapes"):
        fuse(config, named)


QWEN = {
    **hf_config(tiny_config()), "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_hidden_layers": 6,
}  # fmt: skip
MIXTRAL = {
    **hf_config(tiny_config()), "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "dense", "layers"),
    [
        (1, [], (0, 1, 2, 3, 4, 5)),
        (2, [], (1, 3, 5)),
        (1, [0, 4], (1, 2, 3, 5)),
        (3, [2], (5,)),
        (None, None, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_sparse_step_and_dense_layers_say_where_experts_are(step, dense, layers):
    config = from_hf(QWEN | {"decoder_sparse_step": step, "mlp_only_layers": dense})

    assert config.moe.layers == layers


def test_a_mixtral_config_counts_its_experts_in_its_own_words():
    moe = from_hf(MIXTRAL).moe

    assert (moe.num_experts, moe.top_k, moe.intermediate_size, moe.renormalize) == (8, 2, 12, True)
    assert moe.shared_intermediate_size == 0


@pytest.mark.parametrize("norm_topk_prob", [True, False, None])
def test_a_qwen_config_renormalizes_only_when_told(norm_topk_prob):
    config = from_hf(QWEN | {"norm_topk_prob": norm_topk_prob})

    assert config.moe.renormalize is bool(norm_topk_prob)
    assert (config.moe.intermediate_size, config.moe.shared_intermediate_size, config.intermediate_size) == (12, 20, 64)


@pytest.mark.parametrize(("told", "bias"), [({}, True), ({"qkv_bias": False}, False), ({"qkv_bias": True}, True)])
def test_qwen_moe_has_biases_on_q_k_and_v_unless_told(told, bias):
    assert from_hf(QWEN | told).attention.bias is bias


@pytest.mark.parametrize(
    ("raw", "keys", "named"),
    [
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        (MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok 0 of 8"),
        (MIXTRAL, {"num_local_experts": None}, "lacks num_experts"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window"),
        (MIXTRAL, {"model_type": "olmoe", "num_experts": 8, "clip_qkv": 8.0}, "clip_qkv 8.0"),
        (QWEN, {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "mlp_only_layers"),
        (QWEN, {"decoder_sparse_step": 9}, "decoder_sparse_step 9"),
    ],
)
def test_experts_that_make_no_sense_are_refused_by_name(raw, keys, named):
    with pytest.raises(UnsupportedConfig, match=named):
        from_hf(raw | keys)
