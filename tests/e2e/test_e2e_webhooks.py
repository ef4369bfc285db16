"""A whole installation with two gateways tells a receiver on this machine what happens."""

from pathlib import Path

from tests.hooks import is_genuine, receiving
from tests.served import Served, eventually
from tests.tiny import tiny_adapter, write_peft_dir
from tests.uploads import upload


def test_an_uploads_event_reaches_the_tenants_receiver_signed_and_once(tiny: Served, tmp_path: Path):
    key = tiny.new_tenant("with-a-webhook")
    with receiving() as receiver, tiny.http(key) as http:
        hook = http.post("/webhooks", json={"url": f"{receiver.url}/hook"}).json()
        version = upload(http, "told", write_peft_dir(tmp_path, tiny_adapter(31))).json()
        got = eventually(lambda: receiver.received)[0]
        state = eventually(lambda: http.get(f"/webhooks/{hook['id']}/deliveries").json()["data"][0]["attempts"])

        assert (got.path, got.message["type"], got.message["data"]["id"]) == ("/hook", "adapter.ready", version["id"])
        assert is_genuine(hook["secret"], got.headers, got.body)
        assert (state, len(receiver.received)) == (1, 1)
        assert [event["id"] for event in http.get("/organization/events").json()["data"]] == [got.event_id]

        with tiny.ops() as ops:
            tenant = next(each for each in ops.get("/tenants").json()["data"] if each["name"] == "with-a-webhook")
            (seen,) = ops.get(f"/tenants/{tenant['id']}/webhooks").json()["data"]
        assert (seen["id"], seen["status"]) == (hook["id"], "enabled")
        assert [delivery["state"] for delivery in seen["deliveries"]] == ["delivered"]
        assert "whsec_" not in str(seen)
    assert eventually(lambda: tiny.metric("tenora_webhook_deliveries_total", result="delivered")) >= 1
