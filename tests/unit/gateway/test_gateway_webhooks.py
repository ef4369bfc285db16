"""Webhooks of a running gateway: what a tenant manages, and what comes to its receiver."""

from collections.abc import Iterator

import httpx
import pytest
from gateway_harness import House, eventually

from tests.hooks import Received, Receiver, is_genuine, receiving
from tests.tiny import tiny_adapter, write_peft_dir

ABSENT = "evt_" + "0" * 24


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def upload(http: httpx.Client, name: str, folder) -> dict:
    files = write_peft_dir(folder / name, tiny_adapter(seed=5))
    answer = http.post(
        "/adapters",
        data={"name": name, "base_model": "tiny"},
        files={file.name: (file.name, file.read_bytes()) for file in files.iterdir()},
    )
    assert answer.status_code == 201, answer.text
    return answer.json()


def made(http: httpx.Client, url: str, **more) -> dict:
    answer = http.post("/webhooks", json={"url": url, **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


def come(receiver: Receiver, path: str, how_many: int = 1) -> list[Received]:
    return eventually(lambda: len(receiver.at(path)) >= how_many and receiver.at(path))


def delivered(http: httpx.Client, endpoint_id: str, event_id: str) -> dict:
    """The delivery, as soon as it is settled."""

    def found() -> dict | None:
        listed = http.get(f"/webhooks/{endpoint_id}/deliveries").json()["data"]
        return next((each for each in listed if each["event_id"] == event_id and each["attempts"]), None)

    return eventually(found)


def test_an_adapters_life_comes_signed_to_the_endpoint_that_wants_it(house: House, receiver: Receiver, tmp_path):
    with house.http(house.new_tenant("told")) as http:
        wants = made(http, f"{receiver.url}/wants", event_types=["adapter.ready"])
        other = made(http, f"{receiver.url}/other", event_types=["credit.low", "adapter.deleted"])
        version = upload(http, "mine", tmp_path)
        (ready,) = come(receiver, "/wants")
        http.delete("/adapters/mine")
        (deleted,) = come(receiver, "/other")

        assert ready.message["type"] == "adapter.ready"
        named = {name: version[name] for name in ("id", "name", "version", "sha256", "base_model")}
        assert ready.message["data"] == named
        assert ready.message["timestamp"].endswith("Z")
        assert deleted.message["data"] == {"name": "mine", "version": None, "num_versions": 1}
        assert is_genuine(wants["secret"], ready.headers, ready.body)
        assert not is_genuine(other["secret"], ready.headers, ready.body)
        assert delivered(http, wants["id"], ready.event_id)["state"] == "delivered"
        assert len(receiver.received) == 2


def test_what_was_tampered_with_is_not_genuine(house: House, receiver: Receiver):
    with house.http(house.new_tenant("tampered")) as http:
        hook = made(http, f"{receiver.url}/hook")
        http.post(f"/webhooks/{hook['id']}/test")
        (got,) = come(receiver, "/hook")
    assert is_genuine(hook["secret"], got.headers, got.body)
    assert not is_genuine(hook["secret"], got.headers, got.body.replace(b"webhook.test", b"webhook.Test"))
    for name, value in {"webhook-id": ABSENT, "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"}.items():
        assert not is_genuine(hook["secret"], {**got.headers, name: value}, got.body)


def test_a_rotated_secret_and_the_old_one_both_verify_and_each_is_shown_once(house: House, receiver: Receiver):
    with house.http(house.new_tenant("rotating")) as http:
        hook = made(http, f"{receiver.url}/hook")
        rotated = http.post(f"/webhooks/{hook['id']}/rotate", json={"overlap_seconds": 60}).json()
        http.post(f"/webhooks/{hook['id']}/test")
        (got,) = come(receiver, "/hook")
        assert is_genuine(hook["secret"], got.headers, got.body)
        assert is_genuine(rotated["secret"], got.headers, got.body)

        last = http.post(f"/webhooks/{hook['id']}/rotate", json={"overlap_seconds": 0}).json()
        http.post(f"/webhooks/{hook['id']}/test")
        got = come(receiver, "/hook", 2)[1]
        assert is_genuine(last["secret"], got.headers, got.body)
        assert not is_genuine(rotated["secret"], got.headers, got.body)
        shown = http.get("/webhooks").text + http.get(f"/webhooks/{hook['id']}").text
        assert "whsec_" not in shown


def test_a_receiver_that_fails_is_seen_failing_and_is_tried_again_later(house: House, receiver: Receiver):
    receiver.answer = lambda _: 500
    with house.http(house.new_tenant("failing")) as http:
        hook = made(http, f"{receiver.url}/hook")
        event_id = http.post(f"/webhooks/{hook['id']}/test").json()["event_id"]
        delivery = delivered(http, hook["id"], event_id)
        assert (delivery["state"], delivery["attempts"], delivery["last_status"]) == ("pending", 1, 500)
        assert delivery["next_attempt_at"] is not None
        assert http.get(f"/webhooks/{hook['id']}").json()["failing_since"] is not None
        eventually(lambda: house.metric("tenora_webhook_deliveries_total", result="retried") >= 1)
        assert eventually(lambda: house.metric("tenora_webhook_pending")) >= 1
        http.delete(f"/webhooks/{hook['id']}")


def test_an_endpoint_that_says_gone_is_disabled_until_its_owner_enables_it(house: House, receiver: Receiver):
    receiver.answer = lambda _: 410
    with house.http(house.new_tenant("gone")) as http:
        hook = made(http, f"{receiver.url}/hook")
        http.post(f"/webhooks/{hook['id']}/test")
        eventually(lambda: http.get(f"/webhooks/{hook['id']}").json()["status"] == "gone")
        refused = http.post(f"/webhooks/{hook['id']}/test")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "endpoint_id")

        receiver.answer = lambda _: 200
        again = http.post(f"/webhooks/{hook['id']}", json={"enabled": True, "url": f"{receiver.url}/moved"}).json()
        assert (again["status"], again["url"]) == ("enabled", f"{receiver.url}/moved")
        http.post(f"/webhooks/{hook['id']}/test")
        come(receiver, "/moved")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "http://hooks.example/"}, "url"),
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "https://a:b@hooks.example/"}, "url"),
        ({"url": "https://hooks.example/", "event_types": ["adapter.unheard"]}, "event_types"),
        ({"url": "https://hooks.example/", "event_types": ["webhook.test"]}, "event_types"),
        ({"url": "https://hooks.example/", "description": "ä" * 60}, "description"),
    ],
)
def test_a_bad_endpoint_is_400_and_names_the_field(house: House, key: str, body: dict, param: str):
    with house.http(key) as http:
        refused = http.post("/webhooks", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_eleventh_endpoint_is_409(house: House):
    with house.http(house.new_tenant("many-hooks")) as http:
        statuses = [http.post("/webhooks", json={"url": "https://hooks.example/"}).status_code for _ in range(11)]
    assert statuses == [201] * 10 + [409]


def test_many_tests_in_a_minute_are_409(house: House, receiver: Receiver):
    with house.http(house.new_tenant("tests-a-lot")) as http:
        hook = made(http, f"{receiver.url}/hook")
        statuses = [http.post(f"/webhooks/{hook['id']}/test").status_code for _ in range(21)]
    assert statuses == [200] * 20 + [409]


def test_events_can_be_read_on_from_the_last_one_and_are_the_callers_own(house: House, tmp_path):
    mine, theirs = house.new_tenant("reads-events"), house.new_tenant("has-events-too")
    with house.http(mine) as http, house.http(theirs) as other:
        for name in ("a", "b", "c"):
            upload(http, name, tmp_path)
        upload(other, "theirs", tmp_path)
        eventually(lambda: other.get("/organization/events").json()["data"])
        first = http.get("/organization/events?limit=2").json()
        assert [event["data"]["name"] for event in first["data"]] == ["a", "b"]
        assert (first["has_more"], first["last_id"]) == (True, first["data"][1]["id"])
        rest = http.get(f"/organization/events?after={first['last_id']}").json()
        assert [event["data"]["name"] for event in rest["data"]] == ["c"]
        assert not rest["has_more"]
        nothing = http.get(f"/organization/events?after={rest['last_id']}").json()
        assert (nothing["data"], nothing["last_id"]) == ([], rest["last_id"])

        their_id = other.get("/organization/events").json()["data"][0]["id"]
        answers = [http.get(f"/organization/events?after={event_id}") for event_id in (their_id, ABSENT)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(their_id, ABSENT) == answers[1].text


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "1.5", "9" * 30])
def test_a_limit_outside_its_bounds_is_400(house: House, key: str, limit: str):
    with house.http(key) as http:
        refused = http.get("/organization/events", params={"limit": limit})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


def test_a_damaged_adapter_is_told_once_however_many_requests_meet_it(house: House, tmp_path):
    with house.http(house.new_tenant("damaged")) as http:
        version = upload(http, "broken", tmp_path)
        tenant_id = house.tenants[http.headers["authorization"].removeprefix("Bearer ")]
        path = house.parts.blobs.path(tenant_id, version["sha256"])
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
        body = {"model": "broken", "prompt": [5, 6], "max_tokens": 2}
        codes = [http.post("/completions", json=body).json()["error"]["code"] for _ in range(3)]
        assert codes == ["adapter_corrupt"] * 3

        def told() -> list[dict]:
            events = http.get("/organization/events").json()["data"]
            return [event["data"] for event in events if event["type"] == "adapter.corrupt"]

        assert eventually(told) == [{"id": version["id"], "name": "broken", "version": 1}]
