"""Where the seconds of a start go."""

import time


class Phases:
    """Follows a start: what lies between two calls of ``ended`` is one phase. Prints as one line."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return f"{self._last - self._began:.2f} s: {parts}"
