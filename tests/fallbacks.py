"""On a GPU every step takes the kernels and graphs that are meant for it, whatever a suite asks."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.exactness import on_gpu

if TYPE_CHECKING:
    from tests.served import Served

REPORT_VARIABLE = "TENORA_TEST_FALLBACKS"  # a file to which each installation adds a line
KINDS = ("kernel", "graph")

Samples = Mapping[tuple[str, tuple], float]


def seen(served: "Served") -> dict[str, float]:
    """What an installation's engines did not do by their kernels since it started; empty on a CPU, and where it is
    ending already."""
    if not on_gpu() or served.process.poll() is not None:
        return {}
    try:
        samples = served.metrics()
    except httpx.HTTPError:
        return {}
    found = unmeant(samples)
    if os.environ.get(REPORT_VARIABLE):
        line = {"home": served.home.name, "steps": steps(samples), "fallbacks": counted(samples), "unmeant": found}
        with Path(os.environ[REPORT_VARIABLE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return found


def counted(samples: Samples) -> dict[str, float]:
    """Engines' fallbacks by kind and reason, also those that never happened."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        told = dict(labels)
        if name == "tenora_fallbacks_total" and told["kind"] in KINDS:
            found[f"{told['kind']} {told['reason']}"] += value
    return dict(found)


def unmeant(samples: Samples) -> dict[str, float]:
    """Those that happened."""
    return {name: value for name, value in counted(samples).items() if value}


def steps(samples: Samples) -> dict[str, float]:
    """By the bucket that computed them."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        if name == "tenora_batch_shape_total":
            found[dict(labels)["bucket"]] += value
    return dict(found)
