"""`tenora report cost`, with an operator's key."""

from typing import Any

import click

from gateway.client import Answer
from gateway.commands.common import ops_api, ops_options, show

_COLUMNS = {
    "tenant_id": "TENANT",
    "base_model": "MODEL",
    "adapter_version_id": "ADAPTER",
    "flow_class": "CLASS",
    "gpu_s": "GPU S",
    "price_usd": "PRICE USD",
    "cost_usd": "COST USD",
    "margin_usd": "MARGIN USD",
    "full_margin_usd": "WITH UNPAID TIME",
}
_PICO = 10**12


@click.command("cost")
@click.option("--start-time", type=int, help="Unix seconds, inclusive.  [default: a day before the end]")
@click.option("--end-time", type=int, help="Unix seconds, exclusive.  [default: now]")
@click.option("--group-by", default="tenant", show_default=True, help="Of tenant, model, adapter, class: a,b.")
@click.option("--gpu-hour-picousd", type=int, help="Price of a GPU hour, instead of the server's.")
@click.option("--limit", type=int, help="Rows at most; what is behind them is one row.")
@ops_options
def report_cost(as_json: bool, home: Any, ops_url: str, operator_key: str, **query: Any) -> None:
    """What requests cost beside their price, and where the rest of the machines' time went."""
    wanted = {name: value for name, value in query.items() if value is not None}
    answer = ops_api(home, ops_url, operator_key).call("GET", "/reports/cost", params=wanted)
    if as_json:
        show(answer, True, {})
        return
    rows = [*map(_row, answer["data"])]
    if answer["num_others"]:
        rows.append(_row(answer["others"] | {"tenant_id": f"({answer['num_others']} others)"}))
    rows += [_row(account | {"tenant_id": f"({account['account']})"}) for account in answer["accounts"]]
    rows.append(_row(answer["total"] | {"tenant_id": "total"}))
    used = {name for row in rows for name, value in row.items() if value is not None}
    show({"data": rows}, False, {name: title for name, title in _COLUMNS.items() if name in used})
    click.echo(_confidence(answer["cost_model"]))


def _row(row: Answer) -> Answer:
    money = {f"{name}_usd": _usd(row.get(f"{name}_picousd")) for name in ("price", "cost", "margin", "full_margin")}
    return {**row, "gpu_s": f"{row['ns'] / 1e9:.3f}", **money}


def _usd(picousd: int | None) -> str | None:
    """Exact to a millionth."""
    if picousd is None:
        return None
    whole, rest = divmod(abs(picousd), _PICO)
    return f"{'-' if picousd < 0 else ''}{whole}.{rest // 10**6:06}"


def _confidence(model: Answer) -> str:
    if model["error_ratio"] is None:
        return "No step was shared in this time."
    error, r_squared = model["error_ratio"], model["r_squared"]
    return f"Steps are shared by a model that was off by {error:.1%} on average (R² {r_squared:.2f})."
