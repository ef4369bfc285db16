"""`tenora slo`: what tenants are promised."""

from pathlib import Path
from typing import Any

import click

from gateway.commands.common import find_tenant, ops_api, ops_options, show

OBJECTIVE = {
    "name": "NAME",
    "model": "MODEL",
    "class": "CLASS",
    "sli": "SLI",
    "threshold_ms": "THRESHOLD MS",
    "target": "TARGET",
    "window_days": "DAYS",
    "version": "VERSION",
    "effective_at": "EFFECTIVE AT",
}


@click.group("slo")
def slo() -> None:
    """Service level objectives of tenants, as OpenSLO documents. TENANT is an id or a name."""


@slo.command("apply")
@click.argument("file", type=click.File("rb"))
@ops_options
def slo_apply(file: Any, as_json: bool, **where: Any) -> None:
    """Set the objectives in FILE (YAML or JSON; - is stdin), in force from the next minute on. Others stay."""
    headers = {"content-type": "application/yaml"}
    show(ops_api(**where).call("PUT", "/slo-objectives", content=file.read(), headers=headers), as_json, OBJECTIVE)


@slo.command("show")
@click.argument("name", metavar="TENANT")
@click.option("--history", is_flag=True, help="Every version that ever was.")
@ops_options
def slo_show(name: str, history: bool, as_json: bool, **where: Any) -> None:
    """Show a tenant's objectives."""
    api = ops_api(**where)
    params = {"tenant": find_tenant(api, name)["id"], "history": "true" if history else "false"}
    show(api.call("GET", "/slo-objectives", params=params), as_json, OBJECTIVE)


@slo.command("export")
@click.argument("name", metavar="TENANT")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def slo_export(name: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Write a tenant's objectives as OpenSLO documents, which `slo apply` takes. It is YAML with --json too: a JSON
    form of it is what `slo show --json` prints."""
    api = ops_api(**where)
    text = api.text(f"/slo-objectives?tenant={find_tenant(api, name)['id']}&format=openslo")
    with click.open_file(str(output or "-"), "w", encoding="utf-8") as file:
        file.write(text)


@slo.command("delete")
@click.argument("name", metavar="TENANT")
@click.option("--model", default="*", show_default=True)
@click.option("--class", "flow_class", default="*", show_default=True)
@click.option("--sli", help="availability, ttft, tpot or e2e.  [default: all of them]")
@ops_options
def slo_delete(name: str, model: str, flow_class: str, sli: str | None, as_json: bool, **where: Any) -> None:
    """Promise nothing more there, from the next minute on. Reports of earlier times stay as they are."""
    api = ops_api(**where)
    params = {"tenant": find_tenant(api, name)["id"], "model": model, "class": flow_class} | (
        {"sli": sli} if sli else {}
    )
    answer = api.call("DELETE", "/slo-objectives", params=params)
    show(answer, as_json, {"tenant_id": "TENANT", "num_objectives": "OBJECTIVES", "deleted": "DELETED"})
