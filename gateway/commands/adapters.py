"""`tenora adapter`, with a tenant's own key."""

from pathlib import Path
from typing import Any

import click

from gateway.client import Api, adapter_bytes, progress, push_adapter
from gateway.commands.common import Failed, show, tenant_options

ADAPTER = {"name": "NAME", "version": "VERSION", "base_model": "BASE MODEL", "lora_rank": "RANK", "sha256": "SHA-256"}


@click.group("adapter")
def adapter() -> None:
    """A tenant's adapters, with the tenant's own key."""


@adapter.command("push")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="[default: the folder's name]")
@click.option("--base-model", required=True, help="A served base model.")
@click.option("--expected-version", type=click.IntRange(min=0), help="Fail unless this is the current version; 0: new.")
@tenant_options
def adapter_push(folder: Path, name: str | None, base_model: str, expected_version: int | None, **common: Any) -> None:
    """Upload FOLDER (adapter_config.json, adapter_model.safetensors) as the next version."""
    api, name = Api(common["url"], common["api_key"]), name or folder.resolve().name
    try:
        with progress(f"sending {name}", adapter_bytes(folder)) as sent:
            answer = push_adapter(api, folder, name, base_model, expected_version, sent)
    except OSError as error:
        raise Failed(f"{error.filename} can't be read: FOLDER is what PEFT's save_pretrained writes") from error
    show(answer, common["as_json"], ADAPTER)


@adapter.command("list")
@tenant_options
def adapter_list(url: str, api_key: str, as_json: bool) -> None:
    """List the tenant's adapters."""
    show(Api(url, api_key).call("GET", "/adapters"), as_json, ADAPTER)


@adapter.command("delete")
@click.argument("name")
@tenant_options
def adapter_delete(name: str, url: str, api_key: str, as_json: bool) -> None:
    """Delete an adapter with all its versions; running requests finish."""
    gone = Api(url, api_key).call("DELETE", f"/adapters/{name}")
    show(gone, as_json, {"id": "ID", "deleted": "DELETED"})
