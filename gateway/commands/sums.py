"""`tenora sums`, with an operator's key."""

from typing import Any

import click

from gateway.commands.common import Failed, ops_api, ops_options, show

_COLUMNS = {"num_differences": "SUMS THAT DIFFER FROM THE LEDGER"}
_TIMEOUT_S = 3600.0  # with millions of records all are read


@click.group("sums")
def sums() -> None:
    """The sums by minute, hour and day that reports are made of."""


@sums.command("check")
@ops_options
def sums_check(as_json: bool, **where: Any) -> None:
    """Hold the sums against the ledger; exit 1 when any differs."""
    found = ops_api(**where).call("GET", "/rollups", timeout=_TIMEOUT_S)
    show(found, as_json, _COLUMNS)
    if found["num_differences"]:
        raise Failed(f"{found['num_differences']} sums differ: `tenora sums rebuild` makes them anew")


@sums.command("rebuild")
@ops_options
def sums_rebuild(as_json: bool, **where: Any) -> None:
    """Make the sums anew from the ledger; what is booked meanwhile waits."""
    show(ops_api(**where).call("POST", "/rollups/rebuild", timeout=_TIMEOUT_S), as_json, _COLUMNS)
