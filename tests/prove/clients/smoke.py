"""What each smoke run is told, and how it tells what it saw: one JSON object as the last line of stdout.

Runs in a client's own environment: nothing of this project can be imported here.
"""

import json
import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BASE_URL, API_KEY, MODEL = (os.environ[name] for name in ("GW_BASE_URL", "GW_API_KEY", "GW_MODEL"))
CAPITAL = [{"role": "user", "content": "What is the capital of Japan?"}]
CITY = [{"role": "user", "content": "Describe Paris as JSON with name, country and size."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add fields until it has no tokens left

    name: str
    country: str
    size: Literal["small", "large"]


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(description="its name")
    unit: Literal["celsius", "fahrenheit"]


def tell(usages: list[tuple[int, int]], **seen: Any) -> None:
    """``usages``: (prompt, completion) tokens of each request, as the client gives them."""
    print(json.dumps({"usages": usages, **seen}))
