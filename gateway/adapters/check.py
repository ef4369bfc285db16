"""Checks an uploaded adapter in a process of its own, with a deadline: what parses hostile bytes can be killed.

The child is ``python -m gateway.adapters.worker``: one Job or HeaderJob in msgpack on its stdin, one Verdict on its
stdout.
"""

import asyncio
import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
from msgspec import Struct

from engine.wire import ExpertCard
from gateway.errors import ApiError

DEADLINE_S = 60.0
MAX_AT_ONCE = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_slots = asyncio.Semaphore(MAX_AT_ONCE)


class Job(Struct, frozen=True, tag="adapter"):
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
    experts: ExpertCard | None = None


class HeaderJob(Struct, frozen=True, tag="header"):
    """Weights of which the header is here, and jobs for every base model that may be meant: is it one of theirs?

    ``file_bytes`` None: nobody has said how long the file will be."""

    weights: str
    file_bytes: int | None
    bases: list[Job]


AnyJob: TypeAlias = Job | HeaderJob


class Checked(Struct, frozen=True):
    """What a sound upload came to; its canonical file is at the job's ``out``."""

    sha256: str
    size_bytes: int
    lora_rank: int
    target_modules: list[str]
    num_pairs: int
    warnings: list[str]


class Verdict(Struct, frozen=True):
    """Either the adapter or the reasons against it; neither for a sound header. ``no_room``: the disk is full."""

    adapter: Checked | None
    reasons: list[str]
    no_room: bool = False


async def check(job: Job, deadline_s: float = DEADLINE_S) -> Checked:
    """Raises ApiError 422 with all reasons, also when the check didn't end in time; 507."""
    verdict = await _ask(job, deadline_s)
    assert verdict.adapter is not None, "no reasons, so an adapter"
    return verdict.adapter


async def check_header(job: HeaderJob, deadline_s: float = DEADLINE_S) -> None:
    """Raises ApiError 422 with all reasons that the header gives."""
    await _ask(job, deadline_s)


async def _ask(job: AnyJob, deadline_s: float) -> Verdict:
    async with _slots:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.adapters.worker",
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
    if verdict.no_room:
        raise no_room()
    if verdict.reasons:
        raise refusal(verdict.reasons)
    return verdict


def refusal(reasons: list[str]) -> ApiError:
    """422 with everything that is wrong."""
    return ApiError(f"The adapter is refused: {'; '.join(reasons)}", code="invalid_adapter", reasons=tuple(reasons))


def no_room() -> ApiError:
    """507."""
    return ApiError("There is no room for this adapter at the moment.", code="storage_full")


@contextmanager
def disk_may_be_full() -> Iterator[None]:
    """A disk, a quota or a file-size limit that is reached is the caller's 507, not our bug."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room() from None
        raise
