"""One table from failures to answers."""

import json

import pytest

from gateway.admission import rate_limit_headers
from gateway.errors import ENGINE_CODES, TABLE, ApiError, from_engine, invalid_key, model_not_found, sse_error
from tenants.quota.quota import Headroom


@pytest.mark.parametrize("code", TABLE, ids=str)
def test_every_failure_has_openais_four_fields(code: str | None):
    error = ApiError("why", code=code, param="model")

    assert error.body() == {"error": {"message": "why", "type": TABLE[code].type, "param": "model", "code": code}}
    assert 400 <= error.status < 600


def test_waiting_that_helps_is_said_in_seconds_and_milliseconds():
    headers = ApiError("x", code="rate_limit_exceeded", retry_ms=1200).response_headers()

    assert headers == {"retry-after": "2", "retry-after-ms": "1200"}


@pytest.mark.parametrize("code", TABLE, ids=str)
def test_every_refusal_says_whether_waiting_helps(code: str | None):
    headers = ApiError("x", code=code).response_headers()

    if TABLE[code].retry_ms is None:  # of these a limit that can be waited for says so itself
        assert headers == {"x-should-retry": "false"}
    else:
        assert set(headers) == {"retry-after", "retry-after-ms"}


def test_all_refusals_of_ours_say_when_to_come_back():
    ours = [code for code, row in TABLE.items() if row.status == 503]

    assert all("retry-after" in ApiError("x", code=code).response_headers() for code in ours)


def test_a_code_without_a_row_is_our_bug():
    with pytest.raises(AssertionError):
        ApiError("x", code="no_such_code")


def test_no_reason_for_a_401_is_told_from_another():
    assert invalid_key().body() == invalid_key().body()
    assert "tn_" not in json.dumps(invalid_key().body())


def test_a_missing_model_is_told_by_its_name_only():
    one, other = model_not_found("aaaa").body(), model_not_found("bbbb").body()

    assert json.dumps(one).replace("aaaa", "X") == json.dumps(other).replace("bbbb", "X")


def test_a_broken_stream_ends_with_one_error_event():
    event = sse_error(ApiError("gone", code="engine_lost"))

    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("code", ENGINE_CODES)
def test_what_an_engine_says_has_a_row(code: str):
    assert from_engine(code, "m").status in (400, 409, 422, 503)


def test_an_unknown_word_of_an_engine_is_ours_to_answer_for_and_stays_inside():
    error = from_engine("cuda_oops", "at 0x1234")

    assert (error.status, error.code) == (500, "internal")
    assert "0x1234" not in error.message


def test_rate_limit_headers_speak_gos_durations_and_only_of_what_is_limited():
    headroom = Headroom(limit_tokens=100, remaining_tokens=-5, reset_tokens_ms=61_500)

    assert rate_limit_headers(headroom) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "-5",
        "x-ratelimit-reset-tokens": "1m1.5s",
    }
    assert rate_limit_headers(Headroom(limit_requests=1, remaining_requests=0, reset_requests_ms=120)) == {
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "120ms",
    }
