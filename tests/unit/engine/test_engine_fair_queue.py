"""Whose turn: shares by class and weight, no banked credit, no starvation, bounded memory."""

import random
from collections import Counter
from itertools import count

import pytest
from arithmetic_peer import Driver, make_engine, submit

from engine import fair_queue
from engine.fair_queue import FairQueue
from engine.sequence import Request, Sequence


class Server:
    """Serves one sequence a turn, from start to end, and counts what each flow got. A sequence's length is the
    length of its prompt, charged when it is served."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.served: Counter[str] = Counter()
        self.order: list[str] = []
        self._ids = count()

    def arrive(self, flow: str, flow_class: str = "standard", weight: int = 1, length: int = 1) -> Sequence:
        request = Request(submit("r", [1] * length, flow=flow, flow_class=flow_class, weight=weight), 0)
        sequence = Sequence(next(self._ids), request, 0, [1] * length, 0)
        request.sequences = [sequence]
        self.queue.join(sequence)
        self.queue.push(sequence, arrived=True)
        return sequence

    def start(self) -> Sequence:
        """The next one runs; it is charged, and stays work."""
        sequence = self.queue.pop()
        assert sequence is not None
        self.charge(sequence, sequence.num_prompt_tokens)
        self.order.append(sequence.request.submit.flow.key)
        return sequence

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        self.queue.charge(sequence, num_tokens)
        self.served[sequence.request.submit.flow.key] += num_tokens

    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.queue.leave(self.start())
            self.queue.check_invariants()


def test_a_flow_is_served_in_order_of_arrival():
    server = Server()
    sequences = [server.arrive("f") for _ in range(5)]

    assert [server.start() for _ in range(5)] == sequences


def test_one_request_beside_twenty_is_served_within_its_fair_turn():
    server = Server()
    for _ in range(20):
        server.arrive("many", length=10)
    server.arrive("one", length=10)

    server.serve(21)

    assert server.order.index("one") <= 1


def test_backlogged_classes_share_eight_to_four_to_one():
    server = Server()
    for _ in range(1_300):
        for flow_class in ("batch", "standard", "interactive"):
            server.arrive(flow_class, flow_class)

    server.serve(1_300)

    assert server.served == {"interactive": 800, "standard": 400, "batch": 100}


def test_backlogged_flows_of_a_class_share_by_weight_over_short_windows_too():
    server = Server()
    for _ in range(700):
        for flow, weight in (("w1", 1), ("w2", 2), ("w4", 4)):
            server.arrive(flow, weight=weight)

    for window in range(1, 101):
        server.serve(7)
        for flow, weight in (("w1", 1), ("w2", 2), ("w4", 4)):
            assert abs(server.served[flow] - weight * window) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_two_backlogged_flows_never_differ_by_more_than_twice_the_largest_request(seed: int):
    pick, server = random.Random(seed), Server()
    lowest = highest = 0
    arrived: Counter[str] = Counter()
    for _ in range(2_000):
        for flow, backlog in (("steady", 2), ("flood", 16)):
            while arrived[flow] - server.order.count(flow) < backlog:
                arrived[flow] += 1
                server.arrive(flow, length=pick.randint(1, 50))
        server.serve(1)
        difference = server.served["steady"] - server.served["flood"]
        lowest, highest = min(lowest, difference), max(highest, difference)

    assert highest - lowest <= 2 * 50


def test_a_flow_that_comes_back_has_saved_nothing_up():
    server = Server()
    server.arrive("idler")
    for _ in range(3_000):
        server.arrive("worker")
    server.serve(1_001)

    for _ in range(1_000):
        server.arrive("idler")
    server.served.clear()
    server.serve(200)

    assert abs(server.served["idler"] - server.served["worker"]) <= 1


def test_a_flow_that_comes_back_has_saved_nothing_up_when_all_other_work_is_running_already():
    server = Server()
    server.arrive("newcomer")
    server.serve(1)
    running = [server.arrive("worker") for _ in range(4)]
    for _ in running:
        server.start()
    for sequence in running:
        server.charge(sequence, 500)

    for flow in ("newcomer", "worker"):  # the newcomer arrives first, with nobody waiting
        for _ in range(400):
            server.arrive(flow)
    server.served.clear()
    server.serve(200)

    # a newcomer starts where the least served of the running stands
    assert abs(server.served["newcomer"] - server.served["worker"]) <= 1


def test_a_class_that_comes_back_has_saved_nothing_up():
    server = Server()
    server.arrive("i", "interactive")
    for _ in range(4_000):
        server.arrive("b", "batch")
    server.serve(2_000)

    for _ in range(1_000):
        server.arrive("i", "interactive")
    server.served.clear()
    server.serve(900)

    assert server.served["b"] >= 99  # one ninth, as if the class had never been away


def test_a_class_gains_nothing_by_coming_back_while_the_other_runs():
    server = Server()
    keeps_busy = server.arrive("i", "interactive")
    server.start()
    running = server.arrive("b", "batch")
    server.start()
    server.charge(running, 1_000)

    for flow, flow_class in (("i", "interactive"), ("b", "batch")):
        for _ in range(2_000):
            server.arrive(flow, flow_class)
    server.served.clear()
    server.serve(90)

    assert server.served["b"] >= 9
    server.queue.leave(keeps_busy)


def test_flickering_gains_nothing_over_staying():
    server = Server()
    for _ in range(4_000):
        server.arrive("stays")
    for _ in range(500):
        server.arrive("flickers")
        server.serve(5)  # after its turn the flickering flow has no work left until it comes again

    assert server.served["flickers"] <= server.served["stays"]


def test_cancelling_and_sending_again_gains_nothing():
    server = Server()
    for _ in range(400):
        server.arrive("patient")
        server.arrive("canceller")
    for _ in range(100):
        again = server.arrive("canceller")
        assert server.queue.discard(again)
        server.queue.leave(again)
        server.serve(2)

    assert server.served["canceller"] <= server.served["patient"] + 1


def test_who_is_ahead_and_goes_away_for_a_moment_comes_back_as_far_ahead():
    server = Server()
    ahead = server.arrive("ahead")
    for _ in range(300):
        server.arrive("other")
    server.start()
    server.charge(ahead, 100)
    server.queue.leave(ahead)

    for _ in range(200):
        server.arrive("ahead")
    server.served.clear()
    server.serve(100)

    assert server.served["other"] == 100


def test_a_newcomer_does_not_pay_for_somebody_who_ran_ahead_and_left():
    server = Server()
    for _ in range(300):
        server.arrive("other")
    ahead = server.arrive("ahead")
    while "ahead" not in server.order:
        server.start()
    server.charge(ahead, 1_000)
    server.queue.leave(ahead)

    for _ in range(100):
        server.arrive("newcomer")
    server.served.clear()
    server.serve(100)

    assert abs(server.served["newcomer"] - server.served["other"]) <= 1


def test_nobody_starves_behind_a_stream_of_arrivals():
    server = Server()
    for _ in range(3):
        server.arrive("patient", "batch")
    for turn in range(60):
        for flow in range(20):
            server.arrive(f"flow {turn}-{flow}", "interactive")
        server.serve(1)

    assert server.served["patient"] == 3


def test_a_sequence_that_gives_way_takes_its_old_place():
    server = Server()
    first, second = server.arrive("f"), server.arrive("f")
    started = server.start()

    server.queue.push(started, arrived=False)

    assert started is first
    assert [server.start(), server.start()] == [first, second]


def test_a_discarded_sequence_is_never_served():
    server = Server()
    sequences = [server.arrive("f") for _ in range(50)]
    for sequence in sequences[:49]:
        assert server.queue.discard(sequence)
        server.queue.leave(sequence)
        server.queue.check_invariants()

    assert server.start() is sequences[49]
    assert server.queue.pop() is None
    assert not server.queue.discard(sequences[49])


def test_ten_thousand_flows_that_have_gone_leave_no_trace_and_cost_nothing():
    server = Server()
    for _ in range(200):
        server.arrive("worker")
    for number in range(10_000):
        server.arrive(f"guest {number}")
        if number % 50 == 0:
            server.arrive("worker")
        server.queue.leave(server.start())
    server.queue.check_invariants()

    while len(server.queue):
        server.serve(1)
    assert all(len(turns) == 0 for turns in server.queue._flows.values())


def test_who_is_forgotten_under_pressure_comes_back_no_lower_than_it_stood(monkeypatch):
    monkeypatch.setattr(fair_queue, "MAX_IDLE", 4)
    server = Server()
    server.arrive("stays")
    server.start()
    stood = {}
    for number in range(20):
        guest = server.arrive(f"guest {number}")
        server.start()
        server.charge(guest, 100)
        stood[f"guest {number}"] = server.queue._members[guest.seq_id][1].counter
        server.queue.leave(guest)
        server.queue.check_invariants()

    back = {flow: server.queue._members[server.arrive(flow).seq_id][1].counter for flow in stood}

    assert all(back[flow] >= stood[flow] for flow in stood)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_keeps_order_and_counts(seed: int):
    pick, server = random.Random(seed), Server()
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for _ in range(2_000):
        kind = pick.random()
        if kind < 0.4:
            flow_class = pick.choice(("interactive", "standard", "batch"))
            waiting.append(server.arrive(pick.choice("abcdefgh"), flow_class, pick.choice((1, 5)), pick.randint(1, 30)))
        elif kind < 0.6 and waiting:
            sequence = server.start()
            waiting.remove(sequence)
            flow = sequence.request.submit.flow
            older = [item.seq_id for item in waiting if item.request.submit.flow == flow]
            assert all(sequence.seq_id < seq_id for seq_id in older)
            running.append(sequence)
        elif kind < 0.7 and running:
            sequence = running.pop(pick.randrange(len(running)))
            server.queue.push(sequence, arrived=False)
            waiting.append(sequence)
        elif kind < 0.8 and waiting:
            sequence = waiting.pop(pick.randrange(len(waiting)))
            assert server.queue.discard(sequence)
            server.queue.leave(sequence)
        elif running:
            sequence = running.pop(pick.randrange(len(running)))
            server.charge(sequence, pick.randint(1, 40))
            server.queue.leave(sequence)
        server.queue.check_invariants()
        assert len(server.queue) == len(waiting)


# ── through the real engine, in steps ────────────────────────────────────────────────────────────


def test_through_the_engine_one_request_beside_twenty_has_its_turn():
    engine, _ = make_engine(max_running=2)
    driver = Driver(engine)
    for number in range(20):
        driver.add(submit(f"many {number}", [1, 2, 3, number], 5, flow="many", ignore_eos=True))
    driver.add(submit("one", [9, 8, 7], 5, flow="one", ignore_eos=True))

    driver.run()

    ends = sorted((outcome.finished_step, name) for name, outcome in driver.outcomes.items())
    assert [name for _, name in ends].index("one") <= 2  # it waits for a place, then it is next
    assert driver.outcomes["one"].finished_step <= 11


def test_through_the_engine_backlogged_classes_share_their_tokens():
    engine, runner = make_engine(max_running=3, max_step_tokens=8, num_blocks=64)
    driver = Driver(engine)
    for number in range(130):
        for flow_class in ("batch", "standard", "interactive"):
            name = f"{flow_class} {number}"
            driver.add(submit(name, [1 + number % 50, 2, 3, 4], 4, flow_class=flow_class, ignore_eos=True))

    while min(engine.scheduler.waiting.num_sequences.values()) > 0:
        driver.step()

    tokens: Counter[str] = Counter()
    for plan in runner.plans:
        for chunk in plan.chunks:
            tokens[chunk.sequence.request.submit.flow.flow_class] += chunk.num_tokens
    total = sum(tokens.values())
    assert total > 700
    for flow_class, share in (("interactive", 8), ("standard", 4), ("batch", 1)):
        assert abs(tokens[flow_class] - total * share / 13) <= 16, tokens


def test_through_the_engine_a_flow_with_long_outputs_has_no_more_tokens_than_one_with_short_ones():
    engine, runner = make_engine(max_running=2, max_step_tokens=16)
    driver = Driver(engine)
    for number in range(150):
        driver.add(submit(f"talks {number}", [1 + number % 50, 2, 3, 4], 24, flow="talks", ignore_eos=True))
        driver.add(submit(f"brief {number}", [1 + number % 50, 2, 3, 4], 2, flow="brief", ignore_eos=True))

    for _ in range(300):  # both have a backlog all the time
        driver.step()

    tokens: Counter[str] = Counter()
    for plan in runner.plans:
        for chunk in plan.chunks:
            tokens[chunk.sequence.request.submit.flow.key] += chunk.num_tokens
    assert abs(tokens["talks"] - tokens["brief"]) <= 2 * 2 * (4 + 24), tokens
