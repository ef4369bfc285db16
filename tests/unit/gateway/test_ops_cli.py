"""The `tenora` command, run as a program, against a real ops API."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from ops_client import client_of

from gateway.cli import main
from gateway.serve.supervisor import only_one
from tenants.secrets import Secrets
from tests.ops_server import OpsServer, ops_server_in_thread

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpsServer]:
    with ops_server_in_thread(tmp_path_factory.mktemp("home"), "--no-demo") as server:
        yield server


def tenora(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TENORA_")}
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False)


def ask(server: OpsServer, *arguments: str) -> dict:
    """A command's --json, run in this process; it must succeed."""
    clean = dict.fromkeys(name for name in os.environ if name.startswith("TENORA_"))
    where = ["--json", "--home", str(server.home), "--ops-url", server.url]
    done = CliRunner(env=clean).invoke(main, [*arguments, *where])
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_tenant_and_its_keys_from_birth_to_suspension(server: OpsServer) -> None:
    tenant = ask(server, "tenant", "create", "globex")
    assert tenant["name"] == "globex"

    changed = ask(
        server, "tenant", "set", "globex",
        *("requests_per_minute=60", "max_class=batch", "time_zone=Asia/Tokyo", "billing_anchor_day=31"),
    )  # fmt: skip
    assert (changed["limits"]["requests_per_minute"], changed["limits"]["max_class"]) == (60, "batch")
    assert (changed["time_zone"], changed["billing_anchor_day"]) == ("Asia/Tokyo", 31)
    assert (
        ask(server, "tenant", "set", tenant["id"], "requests_per_minute=none")["limits"]["requests_per_minute"] is None
    )

    key = ask(server, "key", "create", "globex", "--name", "ci")
    new = ask(server, "key", "rotate", key["id"], "--overlap-seconds", "0")
    assert ask(server, "key", "revoke", new["id"])["deleted"] is True
    states = {found["id"]: found["revoked_at"] is None for found in ask(server, "key", "list", "globex")["data"]}
    assert states == {key["id"]: False, new["id"]: False}

    assert ask(server, "tenant", "suspend", "globex")["status"] == "suspended"
    assert ask(server, "tenant", "show", "globex")["status"] == "suspended"


def test_a_tenant_renamed_suspended_exported_and_deleted(server: OpsServer, tmp_path: Path) -> None:
    tenant = ask(server, "tenant", "create", "initech")
    assert ask(server, "tenant", "rename", "initech", "initrode")["id"] == tenant["id"]
    assert ask(server, "tenant", "suspend", "initrode")["status"] == "suspended"
    assert ask(server, "tenant", "unsuspend", "initrode")["status"] == "active"
    ask(server, "key", "create", "initrode", "--scope", "usage")

    where = ["--home", str(server.home), "--ops-url", server.url]
    done = tenora("tenant", "export", "initrode", "--output", str(tmp_path / "out"), *where)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["object"] for line in lines] == ["tenant", "api_key", "end"]
    assert tenora("tenant", "export", "initrode", *where).stdout == (tmp_path / "out").read_text()

    refused = tenora("tenant", "delete", "initrode", *where)  # nobody there to say yes
    assert refused.returncode == 1
    assert ask(server, "tenant", "delete", "initrode", "--yes")["deleted"] is True
    assert tenora("tenant", "show", "initrode", *where).returncode == 1


def test_whoever_has_read_enough_is_told_nothing(server: OpsServer) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    where = ["--home", str(server.home), "--ops-url", server.url]
    command = [sys.executable, "-m", "gateway.cli", "tenant", "list", *where]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)

    assert (done.returncode, done.stderr) == (1, "")


def test_a_name_with_a_question_mark_means_no_other(server: OpsServer) -> None:
    ask(server, "tenant", "create", "hooli")
    key = ask(server, "key", "create", "hooli")

    done = tenora("key", "revoke", f"{key['id']}?x", "--home", str(server.home), "--ops-url", server.url)

    assert done.returncode == 1
    assert [each["revoked_at"] for each in ask(server, "key", "list", "hooli")["data"]] == [None]


def test_an_operator_and_a_keys_limits(server: OpsServer) -> None:
    anna = ask(server, "operator", "create", "Anna", "--scope", "read", "--scope", "billing")
    new = ask(server, "operator", "rotate", anna["id"], "--overlap-seconds", "0")
    assert ask(server, "operator", "revoke", new["id"])["deleted"] is True
    names = [found["name"] for found in ask(server, "operator", "list")["data"]]
    assert names == ["first start", "Anna", "Anna"]

    tenant = ask(server, "tenant", "create", "limited")
    key = ask(server, "key", "create", tenant["id"])
    ask(server, "key", "limit", key["id"], "requests_per_minute=60")
    limits = ask(server, "key", "limit", key["id"], "model=m", "tokens_per_minute=5")
    assert (limits["requests_per_minute"], limits["scoped"][0]["tokens_per_minute"]) == (60, 5)
    done = tenora(
        "key",
        "limit",
        key["id"],
        "adapter=a",
        "tokens_per_minute=7",
        "--home",
        str(server.home),
        "--ops-url",
        server.url,
    )
    assert done.stdout.splitlines()[0].split() == [
        "SCOPE",
        "REQUESTS_PER_MINUTE",
        "TOKENS_PER_MINUTE",
        "CONCURRENT_REQUESTS",
    ]
    assert "adapter a" in done.stdout


def test_secrets_are_rotated_while_nothing_is_served(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    absent = tenora("secrets", "rotate", *home)
    assert (absent.returncode, absent.stderr.count("\n")) == (1, 1)
    Secrets.load_or_create(tmp_path / "secrets.json")
    done = tenora("secrets", "rotate", *home, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"pepper": 2})
    with only_one(tmp_path):
        served = tenora("secrets", "rotate", *home)
    assert (served.returncode, "stop" in served.stderr) == (1, True)
    assert Secrets.load_or_create(tmp_path / "secrets.json").newest_pepper == 2


def test_the_home_and_url_may_come_from_the_environment(server: OpsServer) -> None:
    done = tenora("tenant", "list", TENORA_HOME=str(server.home), TENORA_OPS_URL=server.url)
    assert done.returncode == 0
    assert done.stdout.split()[:2] == ["ID", "NAME"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tenant", "create", "globex two", "--time-zone", "Mars/Olympus"], "time zone"),
        (["tenant", "show", "nobody"], "tenora tenant list"),
        (["key", "revoke", "absent"], "no key absent"),
        (["operator", "revoke", "absent"], "no operator absent"),
        (["tenant", "rename", "nobody", "x"], "no tenant nobody"),
        (["tenant", "export", "ten_0"], "no tenant ten_0"),
        (["tenant", "set", "x", "requests_per_minute"], "FIELD=VALUE"),
        (["tenant", "list", "--operator-key", "tn_ops_wrong"], "key"),
        (["tenant", "list", "--ops-url", "http://127.0.0.1:9"], "tenora serve"),
        (["tenant", "list", "--home", "/nonexistent"], "--home"),
        (["tenant", "set", "x", "weight=--5"], "no tenant x"),
        (["tenant", "set", "x", f"weight={'1' * 5000}"], "no tenant x"),
        (["tenant", "list", "--operator-key", "tn_öps"], "key"),
        (["tenant", "list", "--operator-key", "tn_ops_secret\n"], "key"),
        (["migrate", "upgrade", "--home", "/dev/null/x"], "/dev/null/x"),
        (["serve", "--home", "/dev/null/x", "--port", "0", "--ops-port", "0"], "/dev/null/x"),
        (["serve", "--home", "/dev/null", "--port", "0", "--ops-port", "0"], "/dev/null"),
        (["serve", "--redis-url", "http://user:secret@x"], "redis://"),
        (["serve", "--gateways", "0"], "(see `tenora serve --help`)"),
        (["serve", "--database-url", "mysql://user:secret@x/y"], "postgresql://"),
        (["audit", "--database-url", "mysql://user:secret@x/y"], "postgresql://"),
        (["migrate", "check", "--database-url", "secret"], "postgresql://"),
    ],
)
def test_a_failure_is_one_line_that_says_what_to_do(server: OpsServer, arguments: list[str], says: str) -> None:
    where = [
        "--home",
        str(server.home),
        *(["--ops-url", server.url] if arguments[0] in ("tenant", "key", "operator") else []),
    ]
    done = tenora(*arguments, *(where if not {"--home", "--ops-url"} & set(arguments) else []))
    if "--ops-url" in arguments:
        done = tenora(*arguments, "--home", str(server.home))
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tenora: ")
    assert says in done.stderr
    assert "secret" not in done.stderr


def test_credentials_that_are_none_are_a_failure_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_text("[]")
    done = tenora("tenant", "list", "--home", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_migrate_upgrades_checks_and_downgrades(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    assert tenora("migrate", "check", *home).returncode == 1
    assert tenora("migrate", "upgrade", *home).returncode == 0
    assert tenora("migrate", "check", *home, "--json").stdout
    assert tenora("migrate", "downgrade", *home).returncode == 0
    failed = tenora("migrate", "check", *home)
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


def commands(group: click.Command, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, group
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, *names, name)


def test_every_command_has_help_and_json() -> None:
    for names, command in commands(main):
        if names == ("engine",):  # has its own
            continue
        assert command.help, names
        if not isinstance(command, click.Group) and names != ("serve",):
            assert "as_json" in {parameter.name for parameter in command.params}, names


def test_serve_on_a_port_that_is_taken_says_so(tmp_path: Path, server: OpsServer) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    port = server.url.rpartition(":")[2]
    done = tenora("serve", "--home", str(tmp_path), "--model", str(model), "--port", port)
    assert done.returncode == 1
    assert "--port" in done.stderr.splitlines()[-1]


def test_serve_without_its_model_says_what_a_model_is(tmp_path: Path) -> None:
    done = tenora("serve", "--home", str(tmp_path), "--model", "x=/absent", "--port", "0", "--ops-port", "0")
    assert done.returncode == 1
    assert "config.json" in done.stderr.splitlines()[-1]


def test_serve_in_a_home_that_is_served_says_so_and_leaves_its_sockets_alone(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    store = tmp_path / "run" / "valkey.sock"
    store.parent.mkdir(mode=0o700)
    store.touch()
    with only_one(tmp_path):
        done = tenora("serve", "--home", str(tmp_path), "--model", str(model), "--port", "0", "--ops-port", "0")

    assert done.returncode == 1
    assert "another --home" in done.stderr.splitlines()[-1]
    assert store.exists()


def test_credit_is_granted_once_a_reference_and_shown(server: OpsServer) -> None:
    where = ("--home", str(server.home), "--ops-url", server.url)
    tenant = ask(server, "tenant", "create", "prepaid-by-hand")
    absent = tenora("tenant", "credit", "prepaid-by-hand", *where)
    assert (absent.returncode, "no prepaid credit" in absent.stderr) == (1, True)

    for _ in range(2):
        granted = ask(server, "tenant", "credit", tenant["id"], "12.000000000001", "--reference", "payment 1")
        assert granted["granted_picousd"] == granted["free_picousd"] == 12 * 10**12 + 1
    assert ask(server, "tenant", "credit", "prepaid-by-hand") == granted
    with client_of(server) as ops:
        events = ops.get("/audit", params={"after": 0}).json()["data"]
    assert [event["action"] for event in events if event["target"] == tenant["id"]][1:] == ["credit.grant"]

    other = tenora("tenant", "credit", "prepaid-by-hand", "13", "--reference", "payment 1", *where)
    assert (other.returncode, "has granted" in other.stderr) == (1, True)
    for arguments in (("5",), ("1.0000000000001", "--reference", "x"), ("1e9", "--reference", "x")):
        assert tenora("tenant", "credit", "prepaid-by-hand", *arguments, *where).returncode != 0
    assert ask(server, "tenant", "credit", "prepaid-by-hand") == granted


def test_alerts_are_set_as_a_list_of_percentages(server: OpsServer) -> None:
    ask(server, "tenant", "create", "alerted")
    assert ask(server, "tenant", "set", "alerted", "spend_alerts=80,95")["limits"]["spend_alerts"] == [80, 95]
    assert ask(server, "tenant", "set", "alerted", "spend_alerts=90")["limits"]["spend_alerts"] == [90]
    wrong = tenora("tenant", "set", "alerted", "spend_alerts=most", "--home", str(server.home), "--ops-url", server.url)
    assert wrong.returncode == 2


def test_what_was_set_is_shown(server: OpsServer) -> None:
    ask(server, "tenant", "create", "seen")
    where = ["--home", str(server.home), "--ops-url", server.url]
    told = CliRunner().invoke(main, ["tenant", "set", "seen", "billing_anchor_day=7", "weight=2", *where]).stdout
    assert [line.split()[-2:] for line in told.splitlines()] == [["BILLING_ANCHOR_DAY", "WEIGHT"], ["7", "2"]]
