"""Settings: one table, read from flags or from TENORA_* variables, handed to children without loss."""

from pathlib import Path

import click
import pytest

import migrations
from gateway.settings import EngineAddress, Settings, parse_model, serve_options


def parse(*arguments: str) -> Settings:
    context = click.Command("serve", params=list(serve_options())).make_context("serve", list(arguments))
    return Settings.from_options(context.params)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("TENORA_", "OTEL_")):
            monkeypatch.delenv(name)


def test_a_child_learns_exactly_the_settings_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    sizes = ["--kv-blocks", "256", "--deterministic", "--threads", "3"]
    demo = ["--no-demo", "--drain-seconds", "1.5", "--model", "a=x.gguf", "--model", "b=/models/b"]
    parent = parse("--home", str(tmp_path), "--port", "0", "--engines", "2", *sizes, *demo)

    for name, value in parent.to_env().items():
        monkeypatch.setenv(name, value)

    child = Settings.from_env()
    assert child == parent
    assert child.serve.models == ("a=x.gguf", "b=/models/b")
    assert child.serve.demo is False
    assert dict(child.otel)["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"


def test_a_home_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    home = tmp_path / "a b,c%41#d?e\\f"
    home.mkdir()
    parent = parse("--home", str(home), "--model", f"a={home}/x.gguf", "--model", "b=y.gguf")
    parent = replace(parent, engines=(EngineAddress("a", str(home / "run" / "engine-0.sock")),))
    migrations.upgrade(parent.database_url)
    monkeypatch.setattr("os.environ", parent.child_environment())

    assert Settings.from_env() == parent
    assert [path.name for path in home.iterdir()] == ["tenora.db"]


def test_engine_addresses_reach_the_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    addresses = (EngineAddress("a", "/run/engine-0.sock"), EngineAddress("b", "/run/engine-1.sock"))
    parent = replace(parse("--home", str(tmp_path)), engines=addresses)

    monkeypatch.setattr("os.environ", parent.child_environment())

    assert Settings.from_env().engines == addresses


def test_a_child_does_not_inherit_variables_that_its_parent_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENORA_KV_BLOCKS", "12")
    assert parse("--home", str(tmp_path)).sizes.kv_blocks == 12

    overruled = parse("--home", str(tmp_path), "--kv-blocks", "13")

    assert overruled.child_environment()["TENORA_KV_BLOCKS"] == "13"


def test_every_option_has_a_variable_of_our_prefix() -> None:
    for option in serve_options():
        assert str(option.envvar).startswith("TENORA_"), option.name


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--demo"], True),
        (["--no-demo"], False),
        (["--database-url", "postgresql://db/tenora"], False),
        (["--database-url", "postgresql://db/tenora", "--demo"], True),
    ],
)
def test_demo_tenants_are_made_only_where_nobody_else_can_reach_them(
    tmp_path: Path, arguments: list[str], wanted: bool
) -> None:
    assert parse("--home", str(tmp_path), *arguments).wants_demo is wanted


def test_a_plain_postgres_url_gets_the_async_driver(tmp_path: Path) -> None:
    settings = parse("--home", str(tmp_path), "--database-url", "postgresql://db/tenora")
    assert settings.database_url == "postgresql+asyncpg://db/tenora"


def test_sockets_of_a_deeply_nested_home_still_have_short_paths(tmp_path: Path) -> None:
    settings = parse("--home", str(tmp_path / ("deep" * 30)))
    assert len(str(settings.scrape_path(10))) < 108


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("smollm2-135m", "smollm2-135m", "smollm2-135m"),
        ("/models/Llama-3.gguf", "Llama-3", "/models/Llama-3.gguf"),
        ("/models/qwen", "qwen", "/models/qwen"),
        ("mine=/models/qwen", "mine", "/models/qwen"),
        ("hot=smollm2-135m-moe8?skew=2&seed=1", "hot", "smollm2-135m-moe8?skew=2&seed=1"),
    ],
)
def test_a_model_is_named_by_its_source_unless_told(text: str, name: str, source: str) -> None:
    assert parse_model(text) == (name, source)


@pytest.mark.parametrize("text", ["=x", "a b=/models/x", "name=", "", "smollm2-135m-moe8?skew=2"])
def test_a_model_name_that_clients_could_not_send_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="NAME=SOURCE"):
        parse_model(text)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(click.UsageError, match="one name"):
        parse("--model", "/a/m.gguf", "--model", "/b/m.gguf")


def test_only_sizes_that_were_given_reach_the_engine(tmp_path: Path) -> None:
    given = ["--adapter-memory", "5000", "--adapter-disk", "6000", "--kv-blocks", "64", "--deterministic"]
    assert parse("--home", str(tmp_path), *given).sizes.to_args() == given


def test_only_settings_reads_the_environment() -> None:
    root = Path(__file__).parents[3]
    readers = [
        path.name
        for path in (root / "gateway").rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == ["settings.py"]
