"""How one request is judged: the sample sets of each objective."""

import pytest

from tenants.slo.objectives import Objectives
from tenants.slo.verdict import judge, judge_refusal
from tests.slo_requests import MS, booked, objective

PROMISED = {each.sli: each for each in map(objective, ("availability", "ttft", "tpot", "e2e"))}


def verdict(outcome: int = 200, objectives=PROMISED, **facts):
    request = booked(outcome=outcome, **facts)
    return judge(request, request.context.streamed, request.context.num_choices, objectives)


def samples(**facts) -> set[str]:
    return set(verdict(**facts).samples) & {"ttft", "tpot", "e2e"}


def kept(**facts) -> dict[str, bool]:
    return {sli: good for sli, (_, good) in verdict(**facts).results.items()}


def test_an_answered_stream_is_a_sample_of_everything():
    assert samples() == {"ttft", "tpot", "e2e"}
    assert kept() == {"availability": True, "ttft": True, "tpot": True, "e2e": True}
    assert verdict().met


def test_an_answer_that_was_not_streamed_has_no_first_token():
    assert samples(streamed=False, first_token_ns=0) == {"tpot", "e2e"}
    assert samples(streamed=False, first_token_ns=5 * MS) == {"tpot", "e2e"}


def test_a_stream_without_a_token_gives_no_sample_of_tokens():
    assert samples(output_tokens=0, first_token_ns=0, decode_ns=0) == {"e2e"}


def test_a_single_token_has_no_time_per_token():
    assert samples(output_tokens=1, decode_ns=0) == {"ttft", "e2e"}


def test_several_choices_have_no_time_per_token():
    assert samples(num_choices=2) == {"ttft", "e2e"}


def test_time_per_token_is_compared_without_rounding():
    at_limit = {"objectives": {"tpot": objective("tpot", 10)}}
    assert kept(output_tokens=4, decode_ns=30 * MS, **at_limit)["tpot"]
    assert not kept(output_tokens=4, decode_ns=30 * MS + 1, **at_limit)["tpot"]


def test_a_caller_who_leaves_before_anything_was_promised_is_excluded():
    early = {"outcome": 499, "first_token_ns": 0, "output_tokens": 0, "decode_ns": 0}
    assert verdict(**early).excluded == "left_early"
    assert verdict(**early, objectives={}).excluded == "left_early"
    assert verdict(**early).results == {}
    assert verdict(**early).samples == {}


def test_a_caller_who_leaves_after_the_promised_time_found_us_unavailable():
    late = {"outcome": 499, "first_token_ns": 0, "output_tokens": 0, "decode_ns": 0, "queue_ns": 501 * MS}
    assert verdict(**late).excluded == ""
    assert kept(**late) == {"availability": False}


def test_without_a_stream_the_promised_time_is_that_of_the_whole_answer():
    left = {"outcome": 499, "streamed": False, "first_token_ns": 0}
    assert verdict(**left, queue_ns=300 * MS).excluded == "left_early"  # 485 ms in all
    assert kept(**left, queue_ns=400 * MS)["availability"] is False


def test_a_caller_who_leaves_in_the_middle_of_a_stream_was_served_so_far():
    left = {"outcome": 499, "output_tokens": 5}
    assert samples(**left) == {"ttft", "tpot"}
    assert kept(**left)["availability"]
    assert not verdict(**left).met


def test_a_lost_request_is_bad_and_gives_no_sample():
    assert verdict(outcome=0).samples == {}
    assert kept(outcome=0) == {"availability": False}


def test_a_stream_that_broke_is_bad_but_its_first_token_came():
    assert kept(outcome=500) == {"availability": False, "ttft": True, "tpot": True}
    assert not verdict(outcome=500).met


@pytest.mark.parametrize(
    ("status", "reason", "excluded"),
    [
        (400, "invalid_json", "caller_error"),
        (404, "model_not_found", "caller_error"),
        (409, "idempotency_in_flight", "caller_error"),
        (402, "spend_limit_exceeded", "own_limit"),
        (429, "rate_limit_exceeded", "own_limit"),
        (499, "caller_left", "left_early"),
        (409, "adapter_corrupt", ""),
        (500, "internal", ""),
        (503, "overloaded", ""),
        (503, "draining", ""),
    ],
)
def test_refusals_are_ours_or_the_callers(status, reason, excluded):
    judged = judge_refusal(status, reason, PROMISED)

    assert judged.excluded == excluded
    assert judged.results == ({} if excluded else {"availability": ("slo_availability", False)})


def test_five_phases_of_an_answer_sum_to_its_total():
    found = verdict().samples
    assert sum(found[name] for name in ("queue", "prefill", "decode", "network", "post")) == found["e2e"]


# ── which objective ──────────────────────────────────────────────────────────────────────────────


def in_force(*objectives, models=("support", "smollm2"), flow_class="standard", unix_ns=100):
    found = Objectives(objectives).in_force("ten_a", models, flow_class, unix_ns)
    return {sli: each.version_id for sli, each in found.items()}


def test_the_closest_objective_is_the_one_in_force():
    scopes = [("support", "standard"), ("support", "*"), ("smollm2", "standard"), ("smollm2", "*"), ("*", "*")]
    every = [objective(model=model, flow_class=each, version_id=f"{model} {each}") for model, each in scopes]

    for place, expected in enumerate(scopes):
        assert in_force(*every[place:]) == {"ttft": " ".join(expected)}
    assert in_force(objective(model="other"), objective(flow_class="batch", sli="e2e")) == {}


def test_another_tenants_objective_is_nobodys():
    assert in_force(objective(tenant_id="ten_b")) == {}


def test_a_version_is_in_force_from_its_time_until_the_next_or_its_end():
    versions = [
        objective(version=1, version_id="v1", effective_unix_ns=100),
        objective(version=2, version_id="v2", effective_unix_ns=200),
        objective(version=3, version_id="v3", effective_unix_ns=300, retired=True),
        objective(model="smollm2", flow_class="standard", version_id="near", effective_unix_ns=400),
    ]
    expected = {99: {}, 100: {"ttft": "v1"}, 199: {"ttft": "v1"}, 200: {"ttft": "v2"}, 300: {}, 400: {"ttft": "near"}}

    assert {at: in_force(*versions, unix_ns=at) for at in expected} == expected
