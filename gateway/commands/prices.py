"""`tenora price`."""

import time
from typing import Any

import click

from gateway.client import Answer
from gateway.commands.common import Failed, ops_api, ops_options, show

ITEM = {"meter": "METER", "model": "MODEL", "class": "CLASS", "price_picousd": "PICOUSD", "usd": "USD PER MILLION"}
_PICO_PER_MILLIONTH = 10**6  # a picousd a unit is a millionth of a USD a million units


@click.group("price")
def price() -> None:
    """Rate cards: immutable versions of the prices, in force from a moment in the future on."""


@price.command("show")
@click.argument("rate_card_id", default="")
@ops_options
def price_show(rate_card_id: str, as_json: bool, **where: Any) -> None:
    """Show a rate card: the one in force unless RATE_CARD_ID names another."""
    cards = ops_api(**where).call("GET", "/rate-cards")["data"]
    _show(_chosen(cards, rate_card_id), as_json)


@price.command("list")
@ops_options
def price_list(as_json: bool, **where: Any) -> None:
    """List all versions, in the order in which they take effect."""
    columns = {"id": "ID", "version": "VERSION", "effective_at": "EFFECTIVE AT"}
    show(ops_api(**where).call("GET", "/rate-cards"), as_json, columns)


@price.command("set")
@click.argument("changes", nargs=-1, required=True, metavar="METER[:MODEL[:CLASS]]=PICOUSD...")
@click.option("--effective-from", type=int, help="Unix seconds, in the future.  [default: in a minute]")
@ops_options
def price_set(changes: tuple[str, ...], effective_from: int | None, as_json: bool, **where: Any) -> None:
    """Publish the next rate card: the newest one with these prices. `none` takes an item away; `*` is any.

    A price is in picousd (10^-12 USD) a token or request, and for adapters a megabyte-second.
    """
    body = {"effective_from": effective_from or int(time.time()) + 60, "items": [_item(text) for text in changes]}
    _show(ops_api(**where).call("POST", "/rate-cards", json=body), as_json)


def _chosen(cards: list[Answer], rate_card_id: str) -> Answer:
    now = time.time()
    named = [card for card in cards if card["id"] == rate_card_id]
    in_force = [card for card in cards if card["effective_at"] <= now]
    found = (named if rate_card_id else in_force)[-1:]
    if not found:
        raise Failed(f"no rate card {rate_card_id or 'is in force'}: `tenora price list` shows them")
    return found[0]


def _item(text: str) -> dict[str, Any]:
    """Raises click.UsageError."""
    name, equals, value = text.rpartition("=")
    meter, *scope = name.split(":")
    if not equals or not meter or len(scope) > 2 or not (value == "none" or value.isdecimal()):
        raise click.UsageError(f"{text}: give METER[:MODEL[:CLASS]]=PICOUSD")
    model, flow_class = [*scope, "*", "*"][:2]
    return {
        "meter": meter,
        "model": model,
        "class": flow_class,
        "price_picousd": None if value == "none" else int(value),
    }


def _show(card: Answer, as_json: bool) -> None:
    if not as_json:
        click.echo(f"{card['id']}  version {card['version']}  effective at {card['effective_at']}")
    rows = [item | {"usd": _usd(item["price_picousd"])} for item in card["items"]]
    show(card if as_json else {"data": rows}, as_json, ITEM)


def _usd(picousd: int) -> str:
    whole, part = divmod(picousd, _PICO_PER_MILLIONTH)
    return f"{whole}.{part:06}".rstrip("0").rstrip(".")
