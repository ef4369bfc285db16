"""Writes operator.json and tenant.json beside this file: ``python -m ops.grafana.build``."""

import json
from pathlib import Path

from ops.grafana.operators import OPERATOR
from ops.grafana.panels import Dashboard
from ops.grafana.tenant import TENANT

FOLDER = Path(__file__).parent
DASHBOARDS: dict[str, Dashboard] = {"operator.json": OPERATOR, "tenant.json": TENANT}


def text_of(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.to_json(), indent=1) + "\n"


if __name__ == "__main__":
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(text_of(dashboard))
        print(f"{name}: {sum(len(row.panels) for row in dashboard.rows)} panels")
