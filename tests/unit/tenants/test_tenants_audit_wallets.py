"""The audit of prepaid credit: wallets are what their grants and holds say, each hold resolved as its record was
charged."""

import pytest

from tenants.audit import audit, begin_snapshot
from tenants.ledger import Ledger
from tenants.quota.wallet import Hold, WalletFold, WalletRepository
from tenants.tables import Tenant
from tests.invoicing import instant, make_tenant, publish, request
from tests.tampering import tamper

NOW = instant("2030-03-17")


async def write(database) -> None:
    """Three requests hold credit; of two the records are booked, one runs still."""
    tenant_id, card = await make_tenant(database), await publish(database)
    requests = [request(tenant_id, card, NOW + number, request_id=f"r{number}") for number in range(3)]
    async with database.transaction() as session:
        tenant, wallets = await session.get(Tenant, tenant_id), WalletRepository(session)
        for reference in ("first", "second"):
            await wallets.grant(tenant, 10**12, reference)
        for one in requests:
            assert await wallets.reserve(Hold(tenant_id, one.context.request_id, 0, "gateway 0", 10**9))
    async with database.transaction() as session:
        await Ledger([WalletFold()]).post(session, requests[:2], {})


async def found(database) -> list[str]:
    async with database.session() as session:
        await begin_snapshot(session)
        (holds,) = (each for each in (await audit(session, [])).findings if each.invariant == "I5")
    assert holds.checked == 2 + 3  # receipts and holds
    return holds.examples


def test_wallets_that_the_product_wrote_hold(with_database):
    async def body(database):
        await write(database)
        assert await found(database) == []

    with_database(body)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE wallet SET spent_picousd = spent_picousd - 5", "picousd are left, its grants and holds say"),
        ("UPDATE wallet SET reserved_picousd = 0", "0 picousd reserved, its open holds have 1000000000"),
        ("UPDATE wallet_grant SET amount_picousd = 7 WHERE reference = 'first'", "its grants and holds say"),
        ("UPDATE wallet_hold SET spent_picousd = 1 WHERE request_id = 'r0'", "1 picousd were spent, charged: 2100000"),
        (
            "UPDATE wallet_hold SET resolved_unix_ns = NULL, spent_picousd = NULL WHERE request_id = 'r1'",
            "hold of request r1, attempt 0: its record is booked and it is still open",
        ),
        ("UPDATE wallet_hold SET spent_picousd = 9 WHERE request_id = 'r2'", "attempt 0 was spent and is open"),
    ],
)
def test_a_planted_breach_of_a_wallet_is_found(with_database, statement: str, words: str):
    async def body(database):
        await write(database)
        await tamper(database, statement)
        examples = await found(database)
        assert any(words in example for example in examples), examples

    with_database(body)
