"""A Hugging Face model directory: config.json and one or several safetensors files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.weights.errors import UnsupportedModel, read_json
from engine.weights.quantised import OF_ACTIVATIONS, Layout
from engine.weights.staging import Staging
from kernels.quantised_linear import KINDS

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")
_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_DERIVED = (".rotary_emb.inv_freq",)  # written by old versions; follows from the config


def hf_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as a dict, its end tokens joined by those of ``generation_config.json``.

    Raises UnsupportedModel when it is missing.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory.name}: config.json is missing")
    config = read_json(path)
    generation = directory / "generation_config.json"
    more = read_json(generation) if generation.is_file() else {}
    config["eos_token_id"] = sorted(_ids(config.get("eos_token_id")) | _ids(more.get("eos_token_id")))
    return config


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def shard_paths(directory: Path) -> list[Path]:
    """The files of weights, sorted by name. Raises UnsupportedModel when one is missing or named outside."""
    if not (directory / INDEX).is_file():
        names = {SINGLE}
    else:
        names = set(read_json(directory / INDEX).get("weight_map", {}).values())
    for name in sorted(names):
        if not _SHARD.fullmatch(name):
            raise UnsupportedModel(f"{INDEX} names the file {name[:80]!r}")
        if not (directory / name).is_file():
            raise UnsupportedModel(f"{directory.name}: {name} is missing (only safetensors weights are read)")
    return [directory / name for name in sorted(names)]


def read_weights(
    paths: list[Path], dtype: torch.dtype, layout: Layout | None = None, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """All tensors on ``device`` in ``dtype``, or as ``layout`` has them. Raises UnsupportedModel for a dtype that is no
    float and not the layout's, or a name in two files."""
    copied = _copied if device.type == "cpu" else _sent(Staging(device))
    weights: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name.endswith(_DERIVED if layout is None else _DERIVED + OF_ACTIVATIONS):
                        continue
                    if name in weights:
                        raise UnsupportedModel(f"{path.name}: {name} is in two files")
                    tensor = file.get_tensor(name)
                    weights[name] = copied(tensor, _wanted(name, tensor, dtype, layout))
        except SafetensorError as error:
            raise UnsupportedModel(f"{path.name}: {error}") from error
    return weights


def _wanted(name: str, tensor: torch.Tensor, dtype: torch.dtype, layout: Layout | None) -> torch.dtype:
    if layout is not None and tensor.dtype in KINDS:
        return tensor.dtype
    if tensor.dtype not in _FLOATS:
        raise UnsupportedModel(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}")
    return torch.float32 if layout is not None and name.endswith(layout.suffix) else dtype


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Never a view of the mapped file: the file may change, and the pages would count twice."""
    return tensor.to(dtype, copy=True)


def _sent(staging: Staging) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    return lambda tensor, dtype: staging.send(tensor).to(dtype)
