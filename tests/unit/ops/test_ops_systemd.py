"""The unit of systemd says what `serve` understands, and leaves it the time that it needs to end."""

from gateway.serve import supervisor
from gateway.settings import PREFIX, serve_options
from tests.observed import ROOT

LINES = (ROOT / "ops/systemd/tenora.service").read_text().splitlines()
SETTINGS = [tuple(line.split("=", 1)) for line in LINES if "=" in line and not line.startswith("#")]


def variables() -> dict[str, str]:
    pairs = [value.split("=", 1) for name, value in SETTINGS if name == "Environment"]
    return {name: value for name, value in pairs if name.startswith(PREFIX)}


def test_its_variables_are_options_of_serve():
    assert variables().keys() <= {option.envvar for option in serve_options()}
    assert dict(SETTINGS)["ExecStart"].split()[1:] == ["serve"]


def test_only_the_supervisor_is_told_to_stop_and_has_the_time_for_it():
    parts_s = (supervisor.GATEWAY_EXTRA_S, supervisor.ENGINE_STOP_S, supervisor.OPS_STOP_S, supervisor.STORE_STOP_S)

    assert dict(SETTINGS)["KillMode"] == "mixed"
    assert int(dict(SETTINGS)["TimeoutStopSec"]) >= float(variables()["TENORA_DRAIN_SECONDS"]) + sum(parts_s)
