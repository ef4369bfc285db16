"""What the tests of uploads share: requests as a tenant sends them, and how much memory a gateway takes meanwhile."""

import contextlib
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

FILES = ("adapter_config.json", "adapter_model.safetensors")


def upload(http: httpx.Client, name: str, path: Path, base_model: str = "tiny", **form: str) -> httpx.Response:
    """A multipart upload of a PEFT folder, which is read as it is sent."""
    with contextlib.ExitStack() as stack:
        files = {file: (file, stack.enter_context((path / file).open("rb"))) for file in FILES}
        return http.post("/adapters", data={"name": name, "base_model": base_model, **form}, files=files)


def sound_header(num_bytes: int) -> bytes:
    """Begins a file of one tensor of that size, which no model has: only a check of the whole file finds out."""
    shape = num_bytes // 4
    header = json.dumps({"x": {"dtype": "F32", "shape": [shape], "data_offsets": [0, 4 * shape]}}).encode()
    return struct.pack("<Q", len(header)) + header


def stream_chunks(http: httpx.Client, body: dict) -> Iterator[dict]:
    """The chunks of a streamed completion; it must end with [DONE]."""
    with http.stream("POST", "/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                yield chunk
    raise AssertionError("the stream broke off")


def pss_bytes(process: psutil.Process) -> int:
    """Memory of the process alone, and its share of what it has in common with others."""
    return process.memory_full_info().pss


@dataclass
class Peaks:
    """The most that each process took over what it had at the start, in bytes."""

    start: dict[int, int]
    most: dict[int, int] = field(default_factory=dict)

    @property
    def growth(self) -> int:
        return max(self.most[pid] - self.start[pid] for pid in self.start)


@contextlib.contextmanager
def watched(processes: list[psutil.Process]) -> Iterator[Peaks]:
    """Looks at their memory all the time until the block ends."""
    peaks = Peaks({process.pid: pss_bytes(process) for process in processes})
    peaks.most = dict(peaks.start)
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for process in processes:
                peaks.most[process.pid] = max(peaks.most[process.pid], pss_bytes(process))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()
