"""A second stream of a GPU, for what may run beside the launches of the current one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """What is launched under ``fork`` runs beside what the current stream is given next, until ``join``.

    It sees all that the current stream was given before; what comes behind ``join`` sees what it did. So memory that
    it allocates or reads may be used on both sides without more ado, as long as each fork is joined before the next.
    Both may be captured in a graph. On a CPU everything runs where it stands.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
