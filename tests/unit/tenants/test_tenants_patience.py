"""Waiting by looks: who was given no processor gives nobody up for it."""

import asyncio
import socket
import time

import pytest

from tenants.patience import LOOKS, Patience, patience

SHORT_S = 0.02


def test_a_loop_that_stood_still_takes_the_answer_that_came_meanwhile():
    async def main() -> bytes:
        with near, far:
            async with patience(SHORT_S):
                waiting = asyncio.create_task(asyncio.get_running_loop().sock_recv(near, 1))
                await asyncio.sleep(0)
                far.send(b"x")
                time.sleep(5 * SHORT_S)  # what a busy machine does to a process
                return await waiting

    near, far = socket.socketpair()
    near.setblocking(False)
    assert asyncio.run(main()) == b"x"


def test_who_never_answers_is_given_up():
    async def main() -> None:
        async with patience(SHORT_S):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(main())


def test_what_is_done_in_time_is_not_disturbed_later():
    async def main() -> None:
        async with patience(SHORT_S):
            pass
        await asyncio.sleep(2 * SHORT_S)

    asyncio.run(main())


def test_time_in_which_nothing_ran_counts_as_one_look():
    ended = []

    async def main() -> None:
        waiting = Patience(SHORT_S, lambda: ended.append(True))
        for _ in range(LOOKS - 1):
            time.sleep(2 * SHORT_S)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not ended
        waiting.end()

    asyncio.run(main())
