"""The engine's promises to its callers: refusals, ends, aborts, adapters, usage, metrics."""

from itertools import pairwise

import pytest
from arithmetic_peer import EOS, ArithmeticRunner, Driver, Weights, expected_output, make_engine, submit

from engine import adapter_pool, wire
from engine.engine import Engine
from engine.errors import Busy, InvalidRequest, TooLong
from engine.metering.device_counters import DeviceCounters

PROMPT = [7, 8, 9, 10, 11, 12]


def start(*, fetches: bool = True, **sizes: int) -> tuple[Engine, ArithmeticRunner, Driver]:
    engine, runner = make_engine(**sizes)
    return engine, runner, Driver(engine, fetches=fetches)


def usage(driver: Driver, name: str) -> wire.Usage:
    finished = driver.outcomes[name].finished
    assert finished is not None
    return finished.usage


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "request_",
    [
        submit("r", []),
        submit("r", [61]),
        submit("r", [-1]),
        submit("r", [1], num_choices=0),
        submit("r", [1], -1),
        submit("r", [1], logit_bias={61: 1.0}),
        wire.Submit("r", [], wire.SamplingParams(1), wire.Flow("f"), b"", 1),
        wire.Submit("r", [b"\1\0\0"], wire.SamplingParams(1), wire.Flow("f"), b"", 1),
    ],
)
def test_what_the_gateway_should_have_refused_is_refused_and_leaves_no_trace(request_: wire.Submit):
    engine, _, _ = start()

    with pytest.raises(InvalidRequest) as error:
        engine.add(request_)

    assert error.value.code == "invalid"
    assert not engine.has_work
    engine.check_invariants()


def test_a_request_id_in_use_is_refused_and_the_first_one_goes_on():
    engine, _, driver = start()
    driver.add(submit("r", PROMPT, 3))

    with pytest.raises(InvalidRequest):
        engine.add(submit("r", [1]))

    driver.run()
    assert driver.outcomes["r"].finished


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "fits"), [(31, 5, True), (32, 5, False), (32, 0, True), (33, 0, False)]
)
def test_a_prompt_needs_room_for_one_output_token_in_the_context(num_tokens: int, max_tokens: int, fits: bool):
    engine, _, driver = start(context_tokens=32)
    request = submit("r", [1] * num_tokens, max_tokens, ignore_eos=True)

    if not fits:
        with pytest.raises(TooLong):
            engine.add(request)
        return
    driver.add(request)
    driver.run()
    assert usage(driver, "r").output_tokens == min(1, max_tokens)
    assert driver.outcomes["r"].reasons == {0: "length"}


def test_a_full_queue_is_busy_until_somebody_has_started():
    engine, _, driver = start(max_waiting_requests=2, max_running=1)
    driver.add(submit("r0", PROMPT, 2))
    driver.add(submit("r1", PROMPT, 2))
    with pytest.raises(Busy):
        engine.add(submit("r2", PROMPT, 2))

    driver.step()
    driver.add(submit("r2", PROMPT, 2))
    driver.run()

    assert all(outcome.finished for outcome in driver.outcomes.values())


def test_a_queue_is_bounded_in_tokens_and_one_request_over_it_is_too_long():
    engine, _, driver = start(max_waiting_tokens=40)
    driver.add(submit("r0", PROMPT, 2, num_choices=5))

    with pytest.raises(Busy):
        engine.add(submit("r1", PROMPT, 2, num_choices=2))
    with pytest.raises(TooLong):
        engine.add(submit("r1", PROMPT, 2, num_choices=7))
    engine.abort("r0")
    driver.add(submit("r1", PROMPT, 2, num_choices=2))


def test_an_engine_without_slots_refuses_adapters_and_serves_the_base_model():
    engine, _, driver = start(adapter_slots=0)

    with pytest.raises(InvalidRequest):
        engine.add(submit("r", PROMPT, 2, adapter_key="adapter-a"))
    driver.add(submit("base", PROMPT, 2))
    driver.run()

    assert driver.outcomes["base"].finished


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def eos_prompt() -> list[int]:
    """A prompt whose solo run draws the end token in the middle."""
    for first in range(1, 60):
        prompt = [first, 2, 3]
        output = expected_output(prompt, "", submit("", prompt, 30).sampling)
        if 4 <= len(output) <= 20 and output[-1] == EOS:
            return prompt
    raise AssertionError("the arithmetic never ends")


def test_the_end_token_stops_is_counted_and_is_named():
    engine, _, driver = start()
    prompt, deltas = eos_prompt(), []
    engine.add(submit("r", prompt, 30))
    while engine.has_work:
        deltas += engine.step().deltas

    assert [delta.finish_reason for delta in deltas] == [""] * (len(deltas) - 1) + ["stop"]
    assert deltas[-1].stop_token_id == EOS
    assert wire.unpack_ids(deltas[-1].token_ids) == [EOS]
    assert driver.outcomes == {}


def test_a_stop_token_id_stops_but_not_before_min_tokens():
    _, _, driver = start()
    output = expected_output(PROMPT, "", submit("", PROMPT, 12, ignore_eos=True).sampling)
    stop = output[2]
    given = {"ignore_eos": True, "stop_token_ids": (stop,)}

    driver.add(submit("early", PROMPT, 12, **given))
    driver.add(submit("late", PROMPT, 12, min_tokens=output.index(stop) + 1, **given))
    driver.run()

    assert driver.outcomes["early"].tokens[0] == output[: output.index(stop) + 1]
    assert driver.outcomes["early"].reasons == {0: "stop"}
    assert len(driver.outcomes["late"].tokens[0]) > output.index(stop) + 1


def test_granted_tokens_end_a_choice_unless_more_are_granted_before():
    engine, _, driver = start()
    driver.add(submit("kept", PROMPT, 12, granted_tokens=4, ignore_eos=True))
    driver.add(submit("extended", PROMPT, 12, granted_tokens=4, ignore_eos=True))
    driver.step()

    engine.grant("extended", 9)
    engine.grant("extended", 2)  # never lowers
    engine.grant("nobody", 5)
    driver.run()

    assert len(driver.outcomes["kept"].tokens[0]) == 4
    assert len(driver.outcomes["extended"].tokens[0]) == 9
    assert driver.outcomes["kept"].reasons == driver.outcomes["extended"].reasons == {0: "length"}


def test_a_grant_never_exceeds_max_tokens():
    engine, _, driver = start()
    driver.add(submit("r", PROMPT, 5, granted_tokens=2, ignore_eos=True))
    engine.grant("r", 1_000)

    driver.run()

    assert len(driver.outcomes["r"].tokens[0]) == 5


def test_choices_have_their_own_seeds_and_a_prompt_gives_the_same_alone_and_among_others():
    _, _, driver = start(num_blocks=256)
    given = {"temperature": 1.0, "ignore_eos": True, "num_choices": 3}
    driver.add(submit("alone", PROMPT, 8, seed=42, **given))
    driver.add(submit("among", [[1, 2], PROMPT], 8, seed=42, **given))
    driver.add(submit("drawn", PROMPT, 8, **given))
    driver.run()

    alone, among, drawn = (driver.outcomes[name].tokens for name in ("alone", "among", "drawn"))
    assert [among[choice] for choice in (3, 4, 5)] == [alone[choice] for choice in (0, 1, 2)]
    assert len({tuple(tokens) for tokens in (*alone.values(), *drawn.values())}) == 6


def test_log_probabilities_come_with_their_tokens():
    _, _, driver = start()
    driver.add(submit("r", PROMPT, 5, logprobs=0))
    driver.run()

    outcome = driver.outcomes["r"]
    assert [item.token_id for item in outcome.logprobs[0]] == outcome.tokens[0]


# ── aborts ───────────────────────────────────────────────────────────────────────────────────────


def test_an_abort_frees_blocks_at_once_and_is_told_with_the_next_step():
    engine, runner, driver = start()
    driver.add(submit("r", PROMPT, 50, num_choices=2, ignore_eos=True))
    driver.add(submit("other", [1, 2, 3], 6, ignore_eos=True))
    for _ in range(4):
        driver.step()
    before = len(runner.plans)

    engine.abort("r")
    assert all(sequence.request.request_id == "other" for sequence in engine.scheduler.running)
    driver.step()

    assert driver.outcomes["r"].reasons == {0: "abort", 1: "abort"}
    assert driver.outcomes["r"].finished
    assert usage(driver, "r").output_tokens == sum(map(len, driver.outcomes["r"].tokens.values())) > 0
    assert all(chunk.sequence.request.request_id == "other" for plan in runner.plans[before:] for chunk in plan.chunks)
    driver.run()
    assert engine.scheduler.pool.num_used == 0


def test_one_choice_can_be_aborted_and_the_others_go_on():
    engine, _, driver = start()
    driver.add(submit("r", PROMPT, 10, num_choices=3, ignore_eos=True))
    driver.step()

    engine.abort("r", 0)  # the leader of the other two, which have not started yet
    driver.run()

    outcome = driver.outcomes["r"]
    assert outcome.reasons == {0: "abort", 1: "length", 2: "length"}
    assert [len(outcome.tokens[choice]) for choice in (0, 1, 2)] == [1, 10, 10]


def test_who_is_aborted_while_queued_or_parked_used_nothing():
    engine, runner, driver = start(fetches=False, max_running=1)
    driver.add(submit("first", PROMPT, 3, ignore_eos=True))
    driver.add(submit("queued", PROMPT, 3))
    driver.add(submit("parked", PROMPT, 3, adapter_key="adapter-a", num_choices=2))
    driver.step()

    for name in ("queued", "parked", "nobody"):
        engine.abort(name)
        engine.abort(name)
    driver.run()

    for name in ("queued", "parked"):
        assert set(driver.outcomes[name].reasons.values()) == {"abort"}
        assert (usage(driver, name).output_tokens, usage(driver, name).gpu_ns) == (0, 0)
        assert usage(driver, name).queue_ns > 0
        assert usage(driver, name).prefill_ns == usage(driver, name).decode_ns == 0
    assert {chunk.sequence.request.request_id for plan in runner.plans for chunk in plan.chunks} == {"first"}


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_adapter_is_wanted_once_and_nobody_else_waits_for_it():
    engine, _, driver = start(fetches=False)
    for number in range(3):
        driver.add(submit(f"a{number}", PROMPT, 3, adapter_key="adapter-a"))
    driver.add(submit("base", PROMPT, 3))

    driver.run()
    assert driver.wanted == ["adapter-a"]
    assert driver.outcomes["base"].finished
    assert not driver.outcomes["a0"].reasons

    engine.adapter_ready("adapter-a", Weights("adapter-a"))
    driver.run()
    assert all(outcome.finished for outcome in driver.outcomes.values())
    assert driver.wanted == ["adapter-a"]


def test_requests_for_an_adapter_that_can_not_be_had_fail_with_its_code():
    engine, _, driver = start(fetches=False)
    driver.add(submit("r", PROMPT, 3, adapter_key="adapter-a", num_choices=2))
    driver.add(submit("b", PROMPT, 3, adapter_key="adapter-b"))
    driver.step()

    engine.adapter_failed("adapter-a", "adapter_corrupt", "its hash differs")
    engine.adapter_failed("adapter-x", "adapter_corrupt", "nobody waits for it")
    driver.run()

    outcome = driver.outcomes["r"]
    assert outcome.reasons == {0: "error", 1: "error"}
    assert outcome.finished
    assert (outcome.finished.error_code, outcome.finished.error_message) == ("adapter_corrupt", "its hash differs")
    assert driver.outcomes["b"].finished is None


def test_weights_that_do_not_fit_fail_their_requests_only():
    engine, runner, driver = start(fetches=False, adapter_slots=1)
    driver.add(submit("base", PROMPT, 6, ignore_eos=True))
    driver.add(submit("bad", PROMPT, 3, adapter_key="adapter-a", num_choices=2))
    driver.step()

    engine.adapter_ready("adapter-a", Weights("adapter-a", fits=False))
    driver.step()
    driver.add(submit("good", PROMPT, 3, adapter_key="adapter-b"))
    driver.fetches = True
    driver.run()

    bad = driver.outcomes["bad"].finished
    assert bad
    assert bad.error_code == "invalid_adapter"
    assert set(driver.outcomes["bad"].reasons.values()) == {"error"}
    assert driver.outcomes["base"].reasons == {0: "length"}
    assert driver.outcomes["good"].finished
    assert [weights.key for weights in runner.slots if weights] == ["adapter-b"]


def test_a_deleted_adapter_leaves_its_slot_with_its_last_request():
    engine, runner, driver = start()
    driver.add(submit("r", PROMPT, 6, adapter_key="adapter-a", ignore_eos=True))
    driver.step()
    driver.step()

    engine.forget_adapter("adapter-a")
    driver.step()
    assert [weights.key for weights in runner.slots if weights] == ["adapter-a"]
    driver.run()

    assert runner.slots == [None] * 8
    assert driver.outcomes["r"].reasons == {0: "length"}


@pytest.mark.parametrize(
    ("bound", "value", "most"),
    [("MAX_LOADS_PER_STEP", 2, 2), ("MAX_LOAD_BYTES_PER_STEP", 1, 1)],
    ids=["number", "bytes"],
)
def test_a_storm_of_adapters_is_loaded_in_turns_so_that_no_stream_waits_for_all_of_them(
    bound, value, most, monkeypatch
):
    monkeypatch.setattr(adapter_pool, bound, value)
    _, runner, driver = start(max_running=10)
    driver.add(submit("stream", PROMPT, 30, ignore_eos=True))
    driver.step()
    for number in range(6):
        driver.add(submit(f"r{number}", PROMPT, 4, adapter_key=f"adapter-{number}", ignore_eos=True))
    loads = []
    while driver.engine.has_work:
        before = runner.num_loads
        driver.step()
        loads.append(runner.num_loads - before)

    assert (max(loads), sum(loads)) == (most, 6)
    assert all(outcome.finished for outcome in driver.outcomes.values())


def test_whoever_was_there_before_the_deletion_finishes_even_after_giving_way():
    """Running, preempted and queued: nobody could bring the bytes again, so they stay until the last one is done."""
    engine, runner, driver = start(fetches=False, num_blocks=10, adapter_slots=1, max_running=2)
    for key in ("adapter-a", "adapter-b"):
        engine.adapter_ready(key, Weights(key))
    for number in range(3):
        driver.add(submit(f"r{number}", PROMPT, 20, adapter_key="adapter-a", ignore_eos=True))
    driver.step()
    driver.step()
    engine.forget_adapter("adapter-a")
    driver.add(submit("other", PROMPT, 4, adapter_key="adapter-b", ignore_eos=True))
    driver.run()

    assert engine.scheduler.num_preemptions > 0
    assert {name: outcome.reasons for name, outcome in driver.outcomes.items()} == {
        name: {0: "length"} for name in ("r0", "r1", "r2", "other")
    }
    assert engine.adapters.residency(["adapter-a", "adapter-b"]) == {"adapter-b": ["device", "cpu"]}
    assert [weights.key for weights in runner.slots if weights] == ["adapter-b"]


def test_a_deleted_adapter_that_nobody_uses_is_gone_from_every_memory_with_the_next_step():
    engine, runner, driver = start()
    driver.add(submit("r", PROMPT, 2, adapter_key="adapter-a"))
    driver.run()
    assert engine.adapters.residency() == {"adapter-a": ["device", "cpu"]}

    engine.forget_adapter("adapter-a")

    assert engine.adapters.residency() == {}
    driver.step()
    assert runner.slots == [None] * 8
    assert not engine.has_work


def test_many_adapters_that_are_deleted_at_once_leave_their_slots_in_turns_so_that_no_stream_waits_for_all_of_them():
    engine, runner, driver = start()
    for number in range(6):
        driver.add(submit(f"r{number}", PROMPT, 2, adapter_key=f"adapter-{number}", ignore_eos=True))
    driver.run()
    driver.add(submit("stream", PROMPT, 30, ignore_eos=True))
    driver.step()

    for number in range(6):
        engine.forget_adapter(f"adapter-{number}")
    filled = [sum(weights is not None for weights in runner.slots)]
    driver.add(submit("new", PROMPT, 2, adapter_key="adapter-new", ignore_eos=True))
    while engine.has_work:
        driver.step()
        filled.append(sum(weights is not None for weights in runner.slots))

    assert (filled[0], filled[-1]) == (6, 1)
    assert max(before - after for before, after in pairwise(filled)) == 1
    assert [weights.key for weights in runner.slots if weights] == ["adapter-new"]
    assert driver.outcomes["new"].reasons == {0: "length"}


def test_an_adapter_that_left_host_memory_before_its_turn_is_wanted_again():
    _, _, driver = start(adapter_slots=1, host_adapter_bytes=100)
    for key in ("adapter-a", "adapter-b", "adapter-c"):
        driver.add(submit(key, PROMPT, 4, adapter_key=key, ignore_eos=True))

    driver.run()

    assert all(outcome.reasons == {0: "length"} for outcome in driver.outcomes.values())


# ── usage and metrics ────────────────────────────────────────────────────────────────────────────


def test_durations_sum_to_the_time_from_arrival_to_the_last_token():
    engine, runner, driver = start(max_running=2)
    arrived = {}
    for number in range(5):
        arrived[f"r{number}"] = runner.clock.now_ns
        driver.add(submit(f"r{number}", PROMPT, 4 + number, ignore_eos=True))
    ends: dict[str, int] = {}
    while engine.has_work:
        driver.step()
        for name, outcome in driver.outcomes.items():
            if outcome.finished:
                ends.setdefault(name, runner.clock.now_ns)

    for name, arrived_ns in arrived.items():
        used = usage(driver, name)
        total = used.queue_ns + used.prefill_ns + used.decode_ns
        assert min(used.queue_ns, used.prefill_ns, used.decode_ns) > 0
        assert 0 <= ends[name] - arrived_ns - total < 100  # a few readings of the clock
    assert usage(driver, "r4").queue_ns > usage(driver, "r0").queue_ns


def test_requests_pay_for_their_tokens_and_all_time_is_in_one_account():
    engine, runner, driver = start()
    began = runner.clock.now_ns + 7  # the engine read the clock once
    driver.add(submit("short", PROMPT, 2, ignore_eos=True))
    driver.add(submit("long", [5] * 40, 20, ignore_eos=True, adapter_key="adapter-a"))
    driver.run()

    accounts = engine.stats.account_ns
    assert usage(driver, "short").gpu_ns + usage(driver, "long").gpu_ns == accounts["attributed"]
    assert usage(driver, "long").gpu_ns > 3 * usage(driver, "short").gpu_ns
    assert accounts["load"] > 0
    assert abs(sum(accounts.values()) - (runner.clock.now_ns - began)) < 200
    before = dict(accounts)
    engine.stats.idle(5_000)
    assert engine.stats.account_ns["idle"] == before["idle"] + 5_000


def values(engine: Engine) -> dict[tuple[str, str], float]:
    """Every sample by its full name and its labels."""
    samples = {}
    for family in engine.stats.families():
        for suffix, labels, value in family.samples:
            assert (family.kind == "counter") == (suffix == "_total")
            samples[family.name + suffix, ",".join(f"{key}={item}" for key, item in labels.items())] = value
    return samples


def test_each_metric_moves_when_what_it_counts_happens():
    engine, _, driver = start(num_blocks=16, adapter_slots=1, max_running=3)
    idle = values(engine)
    for number in range(4):
        driver.add(
            submit(f"r{number}", PROMPT * 2, 30, ignore_eos=True, flow_class=("batch", "interactive")[number % 2])
        )
    driver.add(submit("a", PROMPT, 3, adapter_key="0123456789abcdef"))
    for _ in range(3):
        driver.step()
    busy = values(engine)
    driver.run()
    driver.add(submit("again", PROMPT * 2, 3, ignore_eos=True))
    driver.run()
    after = values(engine)

    for name, labels in (
        ("tenora_queue_depth", "class=batch"),
        ("tenora_queue_depth", "class=standard"),
        ("tenora_kv_blocks", "state=used"),
        ("tenora_kv_blocks_in_use", "class=interactive"),
        ("tenora_kv_fragmentation_ratio", ""),
        ("tenora_adapters_resident", "tier=cpu"),
        ("tenora_gpu_utilization_ratio", ""),
        ("vllm:num_requests_running", ""),
        ("vllm:num_requests_waiting", ""),
        ("vllm:kv_cache_usage_perc", ""),
    ):
        assert idle[name, labels] == 0 < busy[name, labels], name
    for name, labels in (
        ("tenora_batch_sequences_count", ""),
        ("tenora_batch_tokens_sum", "phase=prefill"),
        ("tenora_batch_tokens_sum", "phase=decode"),
        ("tenora_step_seconds_count", "kind=prefill"),
        ("tenora_step_seconds_count", "kind=decode"),
        ("tenora_step_seconds_count", "kind=mixed"),
        ("tenora_kv_block_reuse_total", ""),
        ("tenora_prefix_cache_tokens_total", "result=hit"),
        ("tenora_prefix_cache_tokens_total", "result=miss"),
        ("tenora_preemptions_total", ""),
        ("tenora_adapters_resident", "tier=device"),
        ("tenora_adapter_load_seconds_count", ""),
        ("tenora_adapter_slots", "state=idle"),
        ("tenora_gpu_seconds_total", "account=attributed"),
        ("tenora_gpu_seconds_total", "account=load"),
        ("tenora_gpu_seconds_total", "account=overhead"),
        ("tenora_phase_gpu_seconds_total", "phase=prefill"),
        ("tenora_phase_gpu_seconds_total", "phase=decode"),
        ("tenora_kv_blocks", "state=cached"),
    ):
        assert idle[name, labels] == 0 < after[name, labels], name
    waiting = next(labels for name, labels in busy if name == "vllm:lora_requests_info")
    assert "waiting_lora_adapters=0123456789ab" in waiting
    assert "0123456789abc" not in waiting
    assert after["tenora_adapter_slots", "state=pinned"] == 0
    assert (
        after["tenora_step_seconds_bucket", "kind=decode,le=+Inf"] == after["tenora_step_seconds_count", "kind=decode"]
    )


def test_a_device_tells_its_fallbacks_and_how_much_of_its_memory_it_used():
    engine, runner = make_engine()
    runner.device_counters = counters = DeviceCounters(peak_bytes_s=1e9)
    engine = Engine(engine.config, runner, clock=runner.clock)
    driver = Driver(engine)
    driver.add(submit("r", PROMPT, 4, ignore_eos=True))
    counters.num_bytes += 700
    counters.fallbacks["graph", "too_many_sequences"] += 2
    counters.shapes["decode 8"] += 3
    counters.num_grouped += 5

    driver.run()

    told = values(engine)
    assert told["tenora_fallbacks_total", "kind=graph,reason=too_many_sequences"] == 2
    assert told["tenora_fallbacks_total", "kind=kernel,reason=head_size"] == 0
    assert told["tenora_batch_shape_total", "bucket=decode 8"] == 3
    assert told["tenora_grouped_decodes_total", ""] == 5
    assert told["tenora_memory_bandwidth_ratio", ""] == pytest.approx(700 / engine.stats.account_ns["attributed"])
