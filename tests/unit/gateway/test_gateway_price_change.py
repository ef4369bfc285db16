"""A price change under load: each request is charged at one version, the one in force when it was admitted."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from gateway_harness import House, eventually, rows, running_house

from tenants.pricing import ANY, METERS
from tenants.repositories import RateCardRepository
from tenants.tables import LedgerEntry, RequestRecord

SECOND = 10**9
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 48, "ignore_eos": True}


async def triple_prices(house: House, effective_unix_ns: int):
    async with house.parts.database.transaction() as session:
        cards = RateCardRepository(session)
        (old,) = await cards.list_all()
        changes = {(meter, ANY, ANY): 3 * old.prices[meter, ANY, ANY] for meter in METERS}
        new = await cards.revise(changes, effective_unix_ns, time.time_ns())
    await house.parts.pipeline.directory.refresh()
    return old, new


def test_each_request_around_a_price_change_has_the_price_of_its_admission(tmp_path):
    with running_house(tmp_path, "--kv-blocks", "512", "--max-running", "8") as house:
        key = house.new_tenant("midnight")
        is_over = threading.Event()

        def ask_until_it_is_over() -> int:
            num_asked, is_last = 0, False
            with house.http(key) as http:
                while not is_last:
                    is_last = is_over.is_set()  # and is sent behind midnight, however slow the others were
                    assert http.post("/completions", json=BODY).status_code == 200
                    num_asked += 1
            return num_asked

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask_until_it_is_over) for _ in range(8)]
            eventually(lambda: len(rows(house, key, RequestRecord)) >= 8)
            midnight = (time.time_ns() // SECOND + 3) * SECOND
            old, new = house.on_loop(triple_prices(house, midnight))
            eventually(lambda: time.time_ns() > midnight)
            is_over.set()
            num_asked = sum(each.result() for each in asking)

        records = eventually(lambda: found if len(found := rows(house, key, RequestRecord)) == num_asked else None)
        entries = rows(house, key, LedgerEntry)

    cards = {old.rate_card_id: old, new.rate_card_id: new}
    for record in records:
        in_force = new if record.admitted_unix_ns >= midnight else old
        own = [entry for entry in entries if entry.request_id == record.request_id]
        assert record.rate_card_id == in_force.rate_card_id
        assert {entry.rate_card_id for entry in own} == {in_force.rate_card_id}
        assert record.price_picousd == sum(entry.amount_picousd for entry in own) > 0
        for entry in own:
            assert entry.unit_price_picousd == cards[entry.rate_card_id].prices[entry.meter, ANY, ANY]
    assert {record.rate_card_id for record in records} == set(cards)
    assert any(record.admitted_unix_ns < midnight <= record.finished_unix_ns for record in records)
