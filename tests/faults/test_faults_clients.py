"""Case 20: the client goes away, streamed, not streamed, and while still queued."""

import socket
import sqlite3

from tests.served import DEFAULT_MODEL, Served, eventually

MANY = 1000  # tokens; nobody stays for all of them


def used_blocks(served: Served) -> float:
    return served.metric("tenora_kv_blocks", state="used")


def rows(served: Served, label: str) -> list[tuple]:
    """Receipts by the client's own label: outcome, prompt, output tokens, price."""
    with sqlite3.connect(f"file:{served.home / 'tenora.db'}?mode=ro", uri=True) as db:
        return db.execute(
            "SELECT outcome, prompt_tokens, output_tokens, price_picousd FROM request_record WHERE label = ?",
            (label,),
        ).fetchall()


def post_raw(served: Served, key: str, label: str, body: str) -> socket.socket:
    """A request on a socket of our own, so that closing it is all the server can see."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"x-request-id: {label}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def body_of(max_tokens: int, stream: bool, prompt: str = '"Count with me: one, two, three,"') -> str:
    flag = "true" if stream else "false"
    return (
        f'{{"model": "{DEFAULT_MODEL}", "prompt": {prompt}, "max_tokens": {max_tokens}, "stream": {flag},'
        ' "ignore_eos": true}'
    )


def idle(served: Served) -> bool:
    return (
        used_blocks(served) == 0
        and served.metric("vllm:num_requests_running") == 0
        and served.metric("vllm:num_requests_waiting") == 0
    )


def test_a_streaming_client_that_leaves_stops_generation_and_pays_for_what_came(smollm: Served):
    key = smollm.new_tenant("leaves-streaming", concurrent_requests=1, tokens_per_minute=100_000)
    connection = post_raw(smollm, key, "leaver-a", body_of(MANY, stream=True))
    seen = b""
    while seen.count(b"data: ") < 10:
        piece = connection.recv(65536)
        assert piece, f"cut off after {seen}"
        seen += piece
    connection.close()

    eventually(lambda: idle(smollm))
    ((outcome, prompt_tokens, output_tokens, price),) = eventually(lambda: rows(smollm, "leaver-a"))

    assert outcome == 499
    assert 10 <= output_tokens < MANY
    assert prompt_tokens > 5
    assert price > 0
    with smollm.http(key) as http:  # the one concurrency slot is free again
        assert http.post("/completions", content=body_of(1, stream=False)).status_code == 200


def test_a_waiting_client_that_leaves_is_seen_too(smollm: Served):
    key = smollm.new_tenant("leaves-waiting")
    connection = post_raw(smollm, key, "leaver-b", body_of(MANY, stream=False))
    eventually(lambda: used_blocks(smollm) > 0)
    connection.close()

    eventually(lambda: idle(smollm))
    ((outcome, _, output_tokens, price),) = eventually(lambda: rows(smollm, "leaver-b"))

    assert outcome == 499
    assert output_tokens < MANY
    assert (price > 0) == (output_tokens > 0)


def test_a_client_that_leaves_the_queue_is_charged_nothing(smollm: Served):
    crowd_key, key = smollm.new_tenant("crowd"), smollm.new_tenant("leaves-queue")
    long_prompt = "[" + ", ".join(["700"] * 3000) + "]"
    crowd = [post_raw(smollm, crowd_key, f"crowd-{i}", body_of(2, False, long_prompt)) for i in range(3)]
    eventually(lambda: smollm.metric("vllm:num_requests_running") > 0)
    connection = post_raw(smollm, key, "leaver-c", body_of(MANY, stream=False))
    inside = "vllm:num_requests_running", "vllm:num_requests_waiting"
    eventually(lambda: sum(map(smollm.metric, inside)) == len(crowd) + 1)
    connection.close()

    ((outcome, _, output_tokens, price),) = eventually(lambda: rows(smollm, "leaver-c"))

    assert (outcome, output_tokens, price) == (499, 0, 0)
    for waiting in crowd:
        waiting.close()
    eventually(lambda: idle(smollm))
