"""What OpenAI's own client can tell, over two gateways that share everything but memory."""

import time

import openai
import pytest

from tests.served import Served, eventually

TO_THE_END = {"2": -100}  # never the token that ends an answer: what is drawn is chance
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logit_bias": TO_THE_END}


def test_one_key_is_one_answer_and_one_bill_whichever_gateway_is_asked(tiny: Served):
    key = tiny.new_tenant("once-e2e")
    with tiny.http(key) as http:
        answers = [
            http.post("/chat/completions", json=ASK, headers={"Idempotency-Key": "k", "Connection": "close"})
            for _ in range(8)
        ]
        streamed = [eventually(lambda: (found := _streamed(http)).status_code == 200 and found) for _ in range(2)]
        receipts = {answer.headers["x-request-id"] for answer in (*answers, *streamed)}

        def requests() -> int:
            query = {"start_time": int(time.time()) - 3600}
            page = http.get("/organization/usage/completions", params=query).json()
            return sum(result["num_model_requests"] for bucket in page["data"] for result in bucket["results"])

        assert eventually(lambda: requests() == 2)

    assert len({answer.content for answer in answers}) == 1
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, *["true"] * 7]
    assert streamed[1].json()["id"] == streamed[0].headers["x-request-id"]
    assert len(receipts) == 2


def _streamed(http):
    return http.post("/chat/completions", json=ASK | {"stream": True}, headers={"Idempotency-Key": "s"})


def test_the_stock_client_reads_a_padded_stream_and_the_best_of_several(tiny: Served):
    client = tiny.client()
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    best = client.completions.create(model="tiny", prompt="x", max_tokens=4, n=2, best_of=5, temperature=1.5, seed=3)

    assert all(isinstance(chunk.obfuscation, str) for chunk in chunks)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert len(best.choices) == 2
    assert best.usage is not None
    assert best.usage.completion_tokens > 8


def test_the_stock_client_raises_what_openais_errors_raise(tiny: Served):
    client = tiny.client()
    client.chat.completions.create(**ASK, extra_headers={"Idempotency-Key": "m"})
    with pytest.raises(openai.UnprocessableEntityError) as mismatch:
        client.chat.completions.create(**ASK | {"max_tokens": 2}, extra_headers={"Idempotency-Key": "m"})
    with pytest.raises(openai.BadRequestError) as suffix:
        client.completions.create(model="tiny", prompt="x", suffix="y")

    assert mismatch.value.code == "idempotency_mismatch"
    assert suffix.value.param == "suffix"
    assert suffix.value.request_id
