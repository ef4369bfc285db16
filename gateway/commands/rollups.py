"""`tenora rollups`, with an operator's key."""

from typing import Any

import click

from gateway.commands.common import Failed, ops_api, ops_options, show

_COLUMNS = {"num_differences": "SUMS THAT DIFFER FROM THE LEDGER"}
_TIMEOUT_S = 3600.0  # with millions of records all are read


@click.group("rollups")
def rollups() -> None:
    """The sums by minute, hour and day that reports are made of."""


@rollups.command("check")
@ops_options
def rollups_check(as_json: bool, **where: Any) -> None:
    """Hold the sums against the ledger; exit 1 when any differs."""
    found = ops_api(**where).call("GET", "/rollups", timeout=_TIMEOUT_S)
    show(found, as_json, _COLUMNS)
    if found["num_differences"]:
        raise Failed(f"{found['num_differences']} sums differ: `tenora rollups rebuild` makes them anew")


@rollups.command("rebuild")
@ops_options
def rollups_rebuild(as_json: bool, **where: Any) -> None:
    """Make the sums anew from the ledger; what is booked meanwhile waits."""
    show(ops_api(**where).call("POST", "/rollups/rebuild", timeout=_TIMEOUT_S), as_json, _COLUMNS)
