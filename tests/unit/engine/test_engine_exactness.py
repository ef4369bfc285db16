"""The real engine on the tiny model: what shares a step, how prompts are cut, and what is cached change no bit.

Cases 9 and 12, and the fair turn of two tenants counted in steps.
"""

import random

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.wire import Flow, SamplingParams, Submit, pack_ids, unpack_ids
from tests.families import DENSE, family_adapters, family_weights
from tests.tiny import tiny_adapter, tiny_config, tiny_weights
from tests.tiny_steps import adapter_weights

ADAPTERS = {
    "a": tiny_adapter(1, rank=4),
    "b": tiny_adapter(2, rank=8, modules=("q_proj", "v_proj")),
    "c": tiny_adapter(3, rank=16, modules=("gate_proj", "down_proj")),
    "d": tiny_adapter(4, rank=2, modules=("q_proj", "k_proj", "o_proj"), layers=(1,)),
}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(dtype: torch.dtype = torch.float32, **sizes) -> Engine:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 512, "context_tokens": 512, "adapter_slots": 4} | sizes)
    return Engine(config, Runner(Decoder(tiny_config(), tiny_weights(dtype=dtype)), config))


def submit(name: str, prompt: list[int], adapter: str = "", flow: str = "f", sampling=GREEDY, **more) -> Submit:
    return Submit(
        request_id=name, prompts=[pack_ids(prompt)], sampling=sampling, flow=Flow(flow), adapter_key=adapter,
        cache_namespace=b"n" + adapter.encode(), granted_tokens=sampling.max_tokens, **more,
    )  # fmt: skip


def run(engine: Engine, submits: list[Submit], adapters: dict = ADAPTERS) -> dict[str, tuple]:
    """All of them together to their ends: request → (tokens, log-probabilities), exactly as they came."""
    for item in submits:
        engine.add(item)
    tokens: dict[str, list] = {item.request_id: [] for item in submits}
    logprobs: dict[str, list] = {item.request_id: [] for item in submits}
    for _ in range(5000):
        if not engine.has_work:
            break
        result = engine.step()
        for key in result.wanted:
            engine.adapter_ready(key, adapter_weights(adapters[key]))
        for delta in result.deltas:
            tokens[delta.request_id] += unpack_ids(delta.token_ids)
            logprobs[delta.request_id] += delta.logprobs
    assert not engine.has_work
    return {name: (tuple(tokens[name]), tuple(logprobs[name])) for name in tokens}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(100 * seed + length).choices(range(3, 300), k=length)


MIXED = [("", 1), ("a", 2), ("", 5), ("b", 16), ("a", 17), ("", 33), ("c", 40), ("d", 130)]


def requests(order=None) -> list[Submit]:
    return [submit(f"r{i}", prompt_of(MIXED[i][1]), MIXED[i][0]) for i in order or range(len(MIXED))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_of_a_mixed_batch_equals_its_solo_run_to_the_bit(dtype):
    solo = {}
    for request in requests():
        solo |= run(make_engine(dtype), [request])
    rng = random.Random(9)

    for num in (8, 8, 8, 6, 5, 3):
        order = rng.sample(range(len(MIXED)), num)
        together = run(make_engine(dtype), requests(order))
        assert together == {name: solo[name] for name in together}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-decode"])
def test_chunk_sizes_change_no_bit(dtype, beside: bool):
    """Case 12: 130-token prompts for two adapters, cut in every way."""
    prompts = [submit("x", prompt_of(130), "a"), submit("y", prompt_of(130, 1), "b")]
    companion = [submit("z", prompt_of(3), "", sampling=SamplingParams(60, temperature=0.0, ignore_eos=True))]
    whole = run(make_engine(dtype, max_step_tokens=512), prompts)

    for size in (4, 16, 31, 64, 256):
        cut = run(make_engine(dtype, max_step_tokens=size), (companion if beside else []) + prompts)
        assert {name: cut[name] for name in whole} == whole, f"chunks of {size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prefix_hit_equals_the_cold_run_to_the_bit(dtype):
    prompt = prompt_of(37)
    cold = run(make_engine(dtype), [submit("x", prompt + [7, 8], "a")])
    engine = make_engine(dtype)
    run(engine, [submit("warm", prompt, "a")])

    engine.add(submit("x", prompt + [7, 8], "a"))
    finished, tokens, logprobs = [], [], []
    while engine.has_work:
        result = engine.step()
        finished += result.finished
        for delta in result.deltas:
            tokens += unpack_ids(delta.token_ids)
            logprobs += delta.logprobs

    assert finished[0].usage.cached_tokens == 36
    assert (tuple(tokens), tuple(logprobs)) == cold["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_every_family_has_the_same_bits_alone_together_in_chunks_after_a_hit_and_on_two_threads(name: str, dtype):
    """Prompts on both sides of a block, the window and a tile; chunks of 31 end on none of them."""
    model, adapters = DENSE[name], family_adapters(DENSE[name])
    weights = family_weights(model, dtype=dtype)
    brief = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)

    def engine(**sizes) -> Engine:
        config = EngineConfig(block_size=4, num_blocks=512, context_tokens=512, adapter_slots=4, **sizes)
        return Engine(config, Runner(Decoder(model, weights), config))

    items = [submit(f"r{i}", prompt_of(n), adapter, sampling=brief) for i, (adapter, n) in enumerate(MIXED)]
    solo = {}
    for item in items:
        solo |= run(engine(), [item], adapters)

    chunked = engine(max_step_tokens=31)
    assert run(engine(), items, adapters) == solo
    assert run(chunked, items, adapters) == solo
    again = [msgspec.structs.replace(item, request_id=f"again-{item.request_id}") for item in items]
    assert list(run(chunked, again, adapters).values()) == list(solo.values())
    hits = next(family for family in chunked.stats.families() if family.name.startswith("tenora_prefix_cache_tokens"))
    assert sum(value for _, labels, value in hits.samples if "hit" in str(labels)) > 200  # the prefix cache was used
    torch.set_num_threads(2)
    few = items[3:6]
    assert run(engine(), few, adapters) == {item.request_id: solo[item.request_id] for item in few}


def test_preemption_changes_no_bit():
    items = [submit(f"p{i}", prompt_of(20, i), ("", "a")[i % 2]) for i in range(6)]
    calm = run(make_engine(), items)
    engine = make_engine(num_blocks=20)

    squeezed = run(engine, items)

    assert squeezed == calm
    families = {family.name.removesuffix("_total"): family for family in engine.stats.families()}
    assert sum(value for _, _, value in families["tenora_preemptions"].samples) > 0


def test_sampling_with_a_seed_is_the_same_alone_and_in_company():
    sampling = SamplingParams(16, temperature=1.3, top_p=0.9, top_k=50, seed=5, frequency_penalty=0.5, ignore_eos=True)
    item = submit("s", prompt_of(9), "a", sampling=sampling)
    alone = run(make_engine(), [item])

    assert run(make_engine(), [*requests(), item])["s"] == alone["s"]


def test_two_threads_give_the_bits_of_one():
    """Short: on a busy machine two spinning threads take seconds a step."""
    brief = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True)
    items = [
        submit(f"t{i}", prompt_of(length), adapter, sampling=brief) for i, (adapter, length) in enumerate(MIXED[:7])
    ]
    one = run(make_engine(), items)
    torch.set_num_threads(2)

    assert run(make_engine(), items) == one


def test_a_step_runs_one_forward_whatever_the_number_of_sequences():
    def linear_calls(num: int) -> int:
        config = EngineConfig(block_size=4, num_blocks=512, context_tokens=512, adapter_slots=4)
        runner = Runner(Decoder(tiny_config(), tiny_weights()), config)
        engine = Engine(config, runner)
        for key, adapter in ADAPTERS.items():
            engine.adapter_ready(key, adapter_weights(adapter))
        for i in range(num):
            engine.add(submit(f"r{i}", prompt_of(4, i), ("", "a", "b", "c")[i % 4]))
        counts = []
        for _ in range(3):  # a prefill and two decodes
            before = runner.num_linear_calls
            engine.step()
            counts.append(runner.num_linear_calls - before)
        assert len(set(counts)) == 1
        return counts[0]

    assert linear_calls(1) == linear_calls(8) > 0


def test_adapter_traffic_leaves_the_base_model_to_the_bit():
    weights = tiny_weights()
    kept = {name: weight.clone() for name, weight in weights.items()}
    config = EngineConfig(block_size=4, num_blocks=512, context_tokens=512, adapter_slots=2)
    engine = Engine(config, Runner(Decoder(tiny_config(), weights), config))
    base = [item for item in requests() if not item.adapter_key]
    before = run(engine, base)

    run(engine, [item for item in requests() if item.adapter_key])

    assert run(engine, base) == before
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_a_lone_request_is_served_within_its_fair_turn_not_behind_twenty():
    """Two tenants on the real engine, four sequences at a time: counted in steps, not in seconds."""
    engine = make_engine(max_running=4, max_step_tokens=64)
    for i in range(20):
        engine.add(submit(f"crowd{i}", prompt_of(12, i), flow="crowd"))
    engine.step()
    engine.add(submit("lone", prompt_of(12, 99), flow="lone"))

    ended = []
    for step in range(2000):
        if not engine.has_work:
            break
        ended += [(finished.request_id, step) for finished in engine.step().finished]

    order = [name for name, _ in ended]
    assert len(order) == 21
    assert order.index("lone") < 9  # one wave of four runs, the next wave holds it
