"""The compose file and what it mounts hang together: no Docker is needed to see that."""

import re
from pathlib import Path

import pytest
import yaml

from ops.grafana.panels import PROMETHEUS
from tests.observed import ROOT

FOLDER = ROOT / "ops" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())
SERVICES = COMPOSE["services"]
KEYS = {"image", "network_mode", "command", "environment", "volumes", "depends_on", "restart"}


def mounts(service: dict) -> list[list[str]]:
    return [volume.split(":") for volume in service.get("volumes", ())]


def mounted(name: str, target: str) -> Path:
    """The file or folder of this repository that a service sees at ``target``."""
    (source,) = [source for source, seen, *_ in mounts(SERVICES[name]) if seen == target]
    return (FOLDER / source).resolve()


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / "ops" / path).read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_pinned_image_and_the_keys_that_compose_knows(name: str):
    service = SERVICES[name]

    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert set(service) <= KEYS
    assert set(service.get("depends_on", ())) <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_is_there_and_of_ours_nothing_is_writable(name: str):
    for source, target, *mode in mounts(SERVICES[name]):
        assert target.startswith("/")
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]


def test_everything_listens_on_loopback_only():
    tempo, collector = read("otel/tempo.yml"), read("otel/collector.yml")
    addresses = [
        *(option.split("=")[1] for option in SERVICES["prometheus"]["command"] if "listen-address" in option),
        SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"],
        tempo["server"]["http_listen_address"],
        tempo["server"]["grpc_listen_address"],
        tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"],
        collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"],
    ]

    assert {service["network_mode"] for service in SERVICES.values()} == {"host"}
    assert not [service for service in SERVICES.values() if "ports" in service]
    assert len(addresses) == 6
    assert {address.split(":")[0] for address in addresses} == {"127.0.0.1"}
    assert collector["service"]["telemetry"]["metrics"]["level"] == "none"  # else it would listen, too


def test_grafana_has_no_password_that_is_known_to_all():
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_prometheus_keeps_exemplars_and_reads_our_rules():
    folder = mounted("prometheus", "/etc/prometheus")
    config = yaml.safe_load((folder / "prometheus.yml").read_text())

    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    assert all((folder / name).exists() for name in config["rule_files"])
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8001"]}]


def test_grafana_finds_the_dashboards_their_data_and_the_traces_behind_exemplars():
    provisioning = mounted("grafana", "/etc/grafana/provisioning")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tenora.yml").read_text())["providers"]
    sources = yaml.safe_load((provisioning / "datasources" / "tenora.yml").read_text())["datasources"]
    by_uid = {source["uid"]: source for source in sources}
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    dashboards = mounted("grafana", provider["options"]["path"])
    assert {path.name for path in dashboards.glob("*.json")} == {"operator.json", "tenant.json"}
    assert (mounted("grafana", str(home.parent)) / home.name).exists()
    assert by_uid[PROMETHEUS["uid"]]["url"] == "http://127.0.0.1:9090"
    (destination,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    assert by_uid[destination["datasourceUid"]]["url"].endswith(
        f":{read('otel/tempo.yml')['server']['http_listen_port']}"
    )


def test_the_collector_hands_traces_to_tempo():
    collector, tempo = read("otel/collector.yml"), read("otel/tempo.yml")
    pipeline = collector["service"]["pipelines"]["traces"]

    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(collector[kind])
    assert pipeline["processors"][0] == "memory_limiter"
    (exporter,) = pipeline["exporters"]
    assert (
        collector["exporters"][exporter]["endpoint"]
        == tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    )
