"""A log of steps: each line has the device's time of its own step, whatever the host does meanwhile."""

import random
from functools import partial

import pytest
import torch
from arithmetic_peer import Driver, make_engine, submit

from engine.wire import unpack_ids
from ops.bench.cost import evaluate
from ops.bench.record_steps import HostEvent, Recorder, make_bench, prepared, record


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_takes_what_the_device_took_and_not_what_the_host_waited(overlaps):
    engine, runner = make_engine(overlaps)
    recorder = Recorder(runner, partial(HostEvent, lambda: runner.clock.now_ns))
    engine._runner = recorder
    driver, lines, times_ns = Driver(engine), [], []
    for number in range(4):
        driver.add(submit(f"r{number}", [number + 1] * (3 + 9 * number), 8, ignore_eos=True))
    while engine.has_work:
        runner.clock.now_ns += 1_000_000_000  # the host makes a prompt
        stats = engine.step().stats
        if stats.num_sequences:
            lines.append(recorder.landed())
            times_ns.append(stats.run_ns)

    assert [line["ns"] for line in lines] == [1_000 + 13 * sum(line["tokens"]) for line in lines]
    assert [line["tokens"] for line in lines] == [[chunk.num_tokens for chunk in plan.chunks] for plan in runner.plans]
    assert (max(times_ns) > 1_000_000_000) == overlaps  # from landing to landing, which says little


def test_requests_are_made_before_the_first_step():
    submits = prepared(random.Random(1), 1_000, 400)

    lengths = [len(unpack_ids(one.prompts[0])) for one in submits]
    assert (min(lengths), max(lengths)) >= (8, 300)
    assert max(lengths) <= 400
    assert len({one.prompts[0] for one in submits}) == len(submits)
    assert {one.adapter_key for one in submits} == {"", *(f"a{number}" for number in range(8))}


def test_a_log_of_a_model_with_experts_says_whose_they_were_and_leaves_the_warm_up_out():
    bench = make_bench("tiny_moe", torch.device("cpu"), "")

    lines = list(record(bench, 40, num_warm_up=5))

    counts = bench.engine.stats._experts.counts()
    assert len(lines) == 40
    assert all(min(line["ns"], line["cpu_ns"], sum(line["experts_alone"]) + 1) > 0 for line in lines)
    for line in lines:
        woken = sum(line["experts"])
        assert woken == pytest.approx(round(woken), abs=1e-3)
        assert sum(line["experts_alone"]) <= round(woken) <= sum(map(len, counts))
        assert all(part >= alone for part, alone in zip(line["experts"], line["experts_alone"], strict=True))
    assert any(line["starts"][0] > 0 for line in lines[:1])  # the first steps are not there
    found = evaluate(lines)
    assert found["coefficients_ns"]["expert"] >= 0
    assert found["steps"] == 40
