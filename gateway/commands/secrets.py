"""`tenora secrets`: the installation's secrets file."""

from pathlib import Path

import click

from gateway.commands.common import Failed, as_json, home_option, show


@click.group("secrets")
def secrets() -> None:
    """The installation's secrets file."""


@secrets.command("rotate")
@home_option
@click.option("--secrets", "path", type=Path, envvar="TENORA_SECRETS", help="[default: HOME/secrets.json]")
@as_json
def secrets_rotate(home: Path, path: Path | None, as_json: bool) -> None:
    """Add a new key pepper and context key, while the installation is stopped.

    Keys made from the next start on have the new pepper. Those from before stay valid: `tenora key rotate` gives each
    a successor (`tenora key list --json` shows a key's pepper). Of several hosts, stop all and copy the file to all.
    """
    from gateway.serve.supervisor import only_one
    from gateway.settings import CannotStart
    from tenants.errors import UnsafeSecrets
    from tenants.secrets import rotate

    home = home.expanduser().resolve()
    try:
        with only_one(home):
            changed = rotate(path or home / "secrets.json")
    except CannotStart as error:
        raise Failed(f"{home} is being served: stop `tenora serve` first, then rotate and start it again") from error
    except UnsafeSecrets as error:
        raise Failed(str(error)) from error
    show({"pepper": changed.newest_pepper}, as_json, {"pepper": "PEPPER"})
