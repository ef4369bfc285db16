"""Which sequences run, how many tokens each, who gives way: seen in the plans that the runner got."""

import pytest
from arithmetic_peer import ArithmeticRunner, Driver, Outcome, expected_output, make_engine, submit

from engine.engine import Engine
from engine.errors import TooLong
from engine.sequence import Request, Sequence, SequenceStatus

Started = tuple[Engine, ArithmeticRunner, Driver]


def start(**sizes: int) -> Started:
    engine, runner = make_engine(**sizes)
    return engine, runner, Driver(engine)


def add(driver: Driver, name: str, num_tokens: int, max_tokens: int = 8, **given) -> list[int]:
    """A request whose prompt is like no other's; gives the prompt."""
    prompt = [(3 + 7 * len(driver.outcomes) + 5 * i) % 60 + 1 for i in range(num_tokens)]
    driver.add(submit(name, prompt, max_tokens, **{"ignore_eos": True, **given}))
    return prompt


def names(chunks) -> list[str]:
    return [chunk.sequence.request.request_id for chunk in chunks]


def assert_solo(driver: Driver, prompts: dict[str, list[int]], max_tokens: int = 8) -> None:
    for name, prompt in prompts.items():
        outcome: Outcome = driver.outcomes[name]
        sampling = submit("", prompt, max_tokens, ignore_eos=True).sampling
        assert outcome.tokens[0] == expected_output(prompt, "", sampling), name


def test_decodes_run_in_every_step_beside_a_long_prompt():
    _, runner, driver = start(max_step_tokens=8)
    for number in range(3):
        add(driver, f"decode {number}", 2, 20)
    driver.step()
    add(driver, "document", 60, 2)

    for _ in range(10):
        driver.step()

    for plan in runner.plans[1:]:
        assert names(plan.chunks)[:3] == ["decode 0", "decode 1", "decode 2"]
    assert [plan.num_tokens for plan in runner.plans[1:]] == [8] * 10


@pytest.mark.parametrize("max_step_tokens", [4, 16, 31, 64, 256])
@pytest.mark.parametrize("beside", [False, True])
def test_chunk_sizes_change_nothing(max_step_tokens: int, beside: bool):
    engine, _, driver = start(max_step_tokens=max_step_tokens, num_blocks=128, context_tokens=256)
    if beside:
        add(driver, "stream", 3, 60)
        driver.step()
    for key in ("adapter-a", "adapter-b"):
        driver.add(submit(key, [1 + i % 50 for i in range(130)], 8, adapter_key=key, ignore_eos=True))

    driver.run()

    for key in ("adapter-a", "adapter-b"):
        request = submit(key, [1 + i % 50 for i in range(130)], 8, ignore_eos=True)
        assert driver.outcomes[key].tokens[0] == expected_output(
            [1 + i % 50 for i in range(130)], key, request.sampling
        )
    assert engine.scheduler.num_preemptions == 0


def test_the_youngest_of_the_lowest_class_gives_way_and_is_as_its_solo_run():
    engine, runner, driver = start(num_blocks=12)
    prompts = {
        name: add(driver, name, 7, 20, flow_class=name.split()[0])
        for name in ("batch old", "interactive old", "batch young", "interactive young")
    }

    driver.run()

    preempted = [name.request.request_id for plan in runner.plans for name in plan.preempted]
    assert preempted[0] == "batch young"
    assert "interactive old" not in preempted
    assert engine.scheduler.num_preemptions == len(preempted) > 1
    assert_solo(driver, prompts, 20)
    for outcome in driver.outcomes.values():  # what a resumed one finds of its own isn't reported as cached
        assert outcome.finished
        assert outcome.finished.usage.cached_tokens == 0
    assert engine.scheduler.pool.num_reused > 0


def test_a_preempted_sequence_is_resumed_before_later_arrivals_of_its_flow():
    engine, runner, driver = start(num_blocks=8, max_running=2)
    add(driver, "old", 9, 16)
    add(driver, "young", 9, 16)
    while not engine.scheduler.num_preemptions:
        driver.step()
    add(driver, "late", 2, 4)  # small enough to fit before it

    driver.run()

    resumed = next(number for number, plan in enumerate(runner.plans) if plan.preempted) + 1
    begun = [name for plan in runner.plans[resumed:] for name in names(plan.chunks)]
    assert begun.index("young") < begun.index("late")


def test_who_gave_way_twice_is_spared_though_a_higher_class_keeps_coming():
    _, runner, driver = start(num_blocks=14, max_running=4)
    add(driver, "batch", 9, 40, flow_class="batch")
    for number in range(60):
        add(driver, f"i{number}", 9, 14, flow_class="interactive", flow=f"f{number % 3}")

    driver.run()

    preempted = [sequence.request.request_id for plan in runner.plans for sequence in plan.preempted]
    assert 1 <= preempted.count("batch") <= 2


def test_one_that_fills_the_pool_alone_ends_with_length():
    engine, _, driver = start(num_blocks=16)
    prompt = add(driver, "r", 40, 60)

    driver.run()

    outcome = driver.outcomes["r"]
    assert outcome.reasons == {0: "length"}
    assert len(outcome.tokens[0]) == 16 * 4 - 40 + 1  # all places are computed, and the last one draws another token
    assert_solo(driver, {}, 60)
    assert outcome.tokens[0] == expected_output(prompt, "", submit("", prompt, 25, ignore_eos=True).sampling)
    assert engine.scheduler.pool.num_used == 0


def test_case_23_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody():
    _, runner, driver = start(num_blocks=16)

    with pytest.raises(TooLong):
        add(driver, "never", 100, 4)
    prompts = {f"short {number}": add(driver, f"short {number}", 8) for number in range(3)}
    add(driver, "filling", 40, 60)
    driver.run()

    assert_solo(driver, prompts)
    assert driver.outcomes["filling"].reasons == {0: "length"}
    assert all(plan.chunks for plan in runner.plans)


def test_several_that_fill_the_pool_together_all_end():
    engine, runner, driver = start(num_blocks=8, max_running=8)
    for number in range(6):
        add(driver, f"r{number}", 8, 100, flow_class=("batch", "interactive")[number % 2])

    driver.run()

    assert {outcome.reasons[0] for outcome in driver.outcomes.values()} == {"length"}
    assert engine.scheduler.num_preemptions > 0
    assert all(plan.chunks or plan.exhausted for plan in runner.plans)


def test_choices_that_share_the_whole_pool_all_end():
    engine, _, driver = start(num_blocks=4)
    add(driver, "r", 15, 100, num_choices=4, temperature=1.0, seed=1)

    driver.run()

    assert set(driver.outcomes["r"].reasons.values()) == {"length"}
    assert engine.scheduler.pool.num_used == 0


def test_one_that_no_waiting_would_help_ends_with_length():
    """Nobody is known to come to this; whoever does must not hold back the others for ever."""
    engine, _, driver = start(num_blocks=4)
    request = Request(submit("grown", [1] * 17, 5), engine._clock())
    request.sequences = [Sequence(99, request, 0, [1] * 17, 0)]
    engine.scheduler.add(request.sequences)

    plan = engine.scheduler.schedule()

    assert plan.exhausted == tuple(request.sequences)
    assert not engine.has_work
    assert driver.outcomes == {}


def test_small_ones_pass_a_head_that_does_not_fit():
    _, _, driver = start(num_blocks=16)
    add(driver, "running", 30, 12)
    driver.step()
    add(driver, "large", 40, 2, flow="b")
    add(driver, "small", 5, 2, flow="c")

    for _ in range(4):
        driver.step()

    assert "small" in driver.outcomes
    assert driver.outcomes["small"].finished
    assert not driver.outcomes["large"].tokens
    driver.run()
    assert driver.outcomes["large"].reasons == {0: "length"}


def test_a_head_that_let_enough_others_pass_is_next_though_they_keep_coming():
    _, _, driver = start(num_blocks=16, max_overtakes=5, max_running=3)
    add(driver, "large", 50, 2, flow="large")
    for number in range(3):
        add(driver, f"first {number}", 12, 4, flow=f"f{number}")
    for number in range(60):
        add(driver, f"small {number}", 12, 4, flow=f"f{number % 7}")
        driver.step()

    driver.run()

    order = sorted(driver.outcomes, key=lambda name: driver.outcomes[name].finished_step)
    assert order.index("large") <= 12


def test_an_adapter_without_a_slot_is_served_though_another_one_keeps_coming():
    _, _, driver = start(adapter_slots=1, max_running=4, max_overtakes=8)
    for number in range(4):
        add(driver, f"a{number}", 5, 6, adapter_key="adapter-a", flow="a")
    driver.step()
    driver.step()
    add(driver, "b", 5, 2, adapter_key="adapter-b", flow="b")
    for number in range(4, 80):
        add(driver, f"a{number}", 5, 6, adapter_key="adapter-a", flow=f"flow {number % 9}")
        driver.step()

    driver.run()

    order = sorted(driver.outcomes, key=lambda name: driver.outcomes[name].finished_step)
    assert order.index("b") <= 4 + 8 + 4


def test_case_10_more_adapters_than_slots_and_base_beside_them():
    engine, runner, driver = start(adapter_slots=2)
    prompts = {}
    for number in range(8):
        key = ("adapter-a", "adapter-b", "adapter-c", "")[number % 4]
        prompt = [1 + number, 2, 3, 4, 5 + number]
        prompts[number] = (key, prompt)
        driver.add(submit(f"r{number}", prompt, 8, adapter_key=key, ignore_eos=True))

    driver.run()

    for number, (key, prompt) in prompts.items():
        sampling = submit("", prompt, 8, ignore_eos=True).sampling
        assert driver.outcomes[f"r{number}"].tokens[0] == expected_output(prompt, key, sampling)
    for plan in runner.plans:
        assert len({chunk.sequence.adapter_slot for chunk in plan.chunks} - {-1}) <= 2
    ends = {name: outcome.finished_step for name, outcome in driver.outcomes.items()}
    assert max(ends["r3"], ends["r7"]) < min(ends["r2"], ends["r6"])  # base takes no slot, C waits for one
    assert engine.adapters.num_idle == 2


def test_no_more_run_than_a_step_has_tokens_and_all_of_them_move():
    _, runner, driver = start(max_step_tokens=3, max_running=10)
    for number in range(9):
        add(driver, f"r{number}", 4, 4)

    driver.run()

    assert max(len(plan.chunks) for plan in runner.plans) <= 3
    assert all(outcome.finished for outcome in driver.outcomes.values())


def test_rows_keep_running_when_the_plan_is_full_of_work():
    engine, _, driver = start(max_running=4)
    for number in range(6):
        add(driver, f"r{number}", 6, 3)
    driver.step()

    states = [sequence.status for request in engine._requests.values() for sequence in request.sequences]
    assert states.count(SequenceStatus.RUNNING) == len(engine.scheduler.running) <= 4
