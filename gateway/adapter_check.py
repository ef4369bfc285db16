"""Checks an uploaded adapter in a process of its own, with a deadline: what parses hostile bytes can be killed.

The child is ``python -m gateway.adapter_worker``: one Job in msgpack on its stdin, one Verdict on its stdout.
"""

import asyncio
import sys

import msgspec
from msgspec import Struct

from gateway.errors import ApiError

DEADLINE_S = 60.0
MAX_AT_ONCE = 2
_slots = asyncio.Semaphore(MAX_AT_ONCE)


class Job(Struct, frozen=True):
    """An upload, the shape of its base model, and (by their names) the tenant's limits."""

    config: bytes
    weights: str
    out: str
    modules: dict[str, tuple[int, int]]
    num_layers: int
    max_lora_rank: int
    served_models: list[str]
    max_adapter_rank: int
    max_adapter_bytes: int


class Checked(Struct, frozen=True):
    """What a sound upload came to; its canonical file is at the job's ``out``."""

    sha256: str
    size_bytes: int
    lora_rank: int
    target_modules: list[str]
    num_pairs: int
    warnings: list[str]


class Verdict(Struct, frozen=True):
    """Either the adapter or the reasons against it."""

    adapter: Checked | None
    reasons: list[str]


async def check(job: Job, deadline_s: float = DEADLINE_S) -> Checked:
    """Raises ApiError 422 with all reasons, also when the check didn't end in time."""
    async with _slots:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.adapter_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(deadline_s):
                output, _ = await child.communicate(msgspec.msgpack.encode(job))
        except TimeoutError:
            raise refusal([f"its check took longer than {deadline_s:g} s"]) from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    if child.returncode != 0:
        raise RuntimeError(f"the adapter worker ended with {child.returncode}")
    verdict = msgspec.msgpack.decode(output, type=Verdict)
    if verdict.adapter is None:
        raise refusal(verdict.reasons)
    return verdict.adapter


def refusal(reasons: list[str]) -> ApiError:
    """422 with everything that is wrong."""
    return ApiError(f"The adapter is refused: {'; '.join(reasons)}", code="invalid_adapter", reasons=tuple(reasons))
