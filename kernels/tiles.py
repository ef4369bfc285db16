"""Which tiles a Triton kernel takes: tables by GPU in ``configs``, read once. Nothing is tuned at run time."""

import json
from functools import lru_cache
from pathlib import Path

import torch

CONFIGS = Path(__file__).parent / "configs"


def tiles(kernel: str, device: torch.device, **sizes: int) -> dict[str, int]:
    """The row of ``kernel`` for these sizes: the first whose ``up_to_NAME`` reaches each of them; a row without a
    bound serves all. A GPU without a table of its own takes ``default.json``."""
    for row in _table(_gpu(device))[kernel]:
        if all(size <= row.get(f"up_to_{name}", size) for name, size in sizes.items()):
            return row
    raise LookupError(f"no tiles of {kernel} for {sizes}")


def is_early(kernel: str, device: torch.device) -> bool:
    """Whether ``kernel`` is launched before the kernel before it has ended (programmatic dependent launch).

    It waits (gdc_wait) before it touches what any launch has written. So does each kernel launched so: when one has
    ended, all before it have, and whoever waits for the last one sees what all of them did. Who lets others begin
    early (gdc_launch_dependents) may do so at any time, since they wait for its end.
    """
    return bool(tiles("pdl", device)[kernel])


def early(kernel: str, device: torch.device) -> dict[str, bool]:
    """What a launch of ``kernel`` is given for that."""
    return pdl(is_early(kernel, device))


def pdl(is_early: int) -> dict[str, bool]:
    """What a launch is given that may begin early: its kernel's PDL, and the option."""
    return {"PDL": True, "launch_pdl": True} if is_early else {"PDL": False}


@lru_cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).lower().replace(" ", "_") if device.type == "cuda" else "default"


@lru_cache
def _table(gpu: str) -> dict[str, list[dict[str, int]]]:
    path = CONFIGS / f"{gpu}.json"
    return json.loads((path if path.exists() else CONFIGS / "default.json").read_text())


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number`` ≥ 1."""
    return 1 << (number - 1).bit_length()
