"""Imports the libraries that import more than a gateway uses, without that. Import this before all else that does."""

import importlib
import sys

LEFT_OUT = {  # 7 MB together
    "httpx._main": "httpx's command line: rich, pygments",
    "opentelemetry.metrics": "redis-py's metrics of itself",
    "opentelemetry.sdk.metrics": "the same: the whole SDK, psutil",
}


def _import_lean(*libraries: str) -> None:
    absent = [name for name in LEFT_OUT if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType] (as the import system has it: there is none)
    try:
        for library in libraries:
            importlib.import_module(library)
    finally:
        for name in absent:
            del sys.modules[name]  # whoever does use it finds it


_import_lean("httpx", "redis.asyncio")
