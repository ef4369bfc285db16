"""The meters of adapters over a running engine: who lies on its device is charged for it, and nobody else."""

import time

from gateway_harness import House
from sqlmodel import col, select

from gateway.adapters.meter import AdapterMeter
from tenants.adapters.hours import LOOK_NS
from tenants.tables import AdapterResidency, AdapterVersion
from tests.tiny import tiny_adapter, write_peft_dir


def publish(http, name: str, folder, seed: int) -> None:
    files = {path.name: path.read_bytes() for path in write_peft_dir(folder, tiny_adapter(seed, rank=4)).iterdir()}
    answer = http.post("/adapters", data={"name": name, "base_model": "tiny"}, files=files)
    assert answer.status_code == 201, answer.text


def test_a_version_on_the_device_is_metered_and_one_that_nobody_uses_is_not(house: House, tmp_path):
    key = house.new_tenant("adapters-metered")
    with house.http(key) as http:
        for seed, name in enumerate(("used", "unused"), 71):
            publish(http, name, tmp_path / name, seed)
        body = {"model": "used", "prompt": [5, 6, 7], "max_tokens": 2}
        assert http.post("/completions", json=body).status_code == 200
    parts = house.parts
    meter, now = AdapterMeter(parts.catalog, parts.targets, parts.database), time.time_ns()

    async def read_twice() -> dict[str, int]:
        for moment in (now, now + LOOK_NS):
            await meter.read(moment)
        own = AdapterVersion.tenant_id == house.tenants[key]
        rows = select(AdapterVersion.name, AdapterResidency.resident_ns).join(
            AdapterResidency, col(AdapterResidency.adapter_version_id) == AdapterVersion.adapter_version_id
        )
        async with parts.database.session() as session:
            return dict((await session.exec(rows.where(own))).all())

    assert house.on_loop(read_twice()) == {"used": LOOK_NS}
