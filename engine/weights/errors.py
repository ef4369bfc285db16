"""What can be wrong with files of weights."""

import json
from pathlib import Path
from typing import Any


class UnsupportedModel(Exception):
    """The model can't be served as it is; the message names the file, tensor, field or type at fault."""


class CorruptAdapter(Exception):
    """The bytes of a canonical adapter file aren't what their hash or their format says."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a model's JSON file. Raises UnsupportedModel when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path.name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name} doesn't hold an object")
    return value
