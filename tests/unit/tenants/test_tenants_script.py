"""A script's calls on a real Valkey: one connection, many at once, each with its own answer."""

import asyncio
import contextlib
import signal

import pytest
from redis.asyncio import Redis
from stores import valkey_server

from tenants.errors import StoreUnavailable
from tenants.quota.script import _LOOKS, Script

ECHO = "return {KEYS[1], ARGV[1]}"


async def kill_all_but_own_connection(redis):
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def with_own_server(body):
    """Runs ``body(server, script)`` on a store that it may stop and kill."""

    async def main():
        with valkey_server() as server:
            async with Redis.from_url(server.url) as redis:
                await body(server, Script(redis, ECHO, 30.0))

    asyncio.run(main())


def test_calls_at_once_share_a_connection_and_each_gets_its_own_answer(with_redis):
    async def body(redis):
        script = Script(redis, ECHO, 30.0)
        before = int((await redis.info("clients"))["connected_clients"])
        answers = await asyncio.gather(*(script([f"key-{number}"], [number]) for number in range(200)))
        assert answers == [[b"key-%d" % number, b"%d" % number] for number in range(200)]
        assert int((await redis.info("clients"))["connected_clients"]) == before + 1

    with_redis(body)


def test_a_call_that_is_not_awaited_any_more_leaves_the_others_their_answers(with_redis):
    async def body(redis):
        script = Script(redis, ECHO, 30.0)
        await script(["a"], [0])
        calls = [script(["a"], [number]) for number in range(3)]
        calls[1].cancel()
        first, gone, third = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, third) == ([b"a", b"0"], [b"a", b"2"])
        assert isinstance(gone, asyncio.CancelledError)

    with_redis(body)


def test_a_call_whose_answer_nobody_awaits_is_made_before_those_behind_it(with_redis):
    async def body(redis):
        script = Script(redis, "return redis.call('INCR', KEYS[1])", 30.0)
        assert await script(["a"], []) == 1
        script(["a"], [])
        assert await script(["a"], []) == 3

    with_redis(body)


def test_a_store_that_was_emptied_of_scripts_is_given_it_again(with_redis):
    async def body(redis):
        script = Script(redis, ECHO, 30.0)
        await redis.script_flush()
        assert await script(["a"], [1]) == [b"a", b"1"]
        await redis.script_flush()
        assert await script(["a"], [2]) == [b"a", b"2"]

    with_redis(body)


def test_a_call_behind_a_broken_connection_makes_another(with_redis):
    async def body(redis):
        script = Script(redis, ECHO, 30.0)
        assert await script(["a"], [1]) == [b"a", b"1"]
        for number in range(3):
            await kill_all_but_own_connection(redis)
            with contextlib.suppress(StoreUnavailable):  # it may not have heard yet
                await script(["a"], [number])
            assert await script(["a"], [number]) == [b"a", b"%d" % number]

    with_redis(body)


def test_what_a_broken_connection_was_asked_is_unavailable_for_all_who_wait():
    async def body(server, script):
        await script(["a"], [1])
        server.process.send_signal(signal.SIGSTOP)
        calls = [script(["a"], [number]) for number in range(3)]
        server.process.kill()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3

    with_own_server(body)


def test_each_question_has_its_own_time_and_a_late_answer_is_dropped():
    async def body(server, script):
        await script(["a"], [0])
        line = script._line
        server.process.send_signal(signal.SIGSTOP)
        first = script(["a"], [1])
        for _ in range(_LOOKS):
            line._look()
        second = script(["a"], [2])
        line._look()
        with pytest.raises(StoreUnavailable):
            await first
        assert not second.done()
        server.process.send_signal(signal.SIGCONT)
        assert await second == [b"a", b"2"]
        assert script._line is line
        assert not line.is_closed

    with_own_server(body)


def test_a_line_whose_questions_have_all_had_their_time_is_made_anew():
    async def body(server, script):
        await script(["a"], [0])
        line = script._line
        server.process.send_signal(signal.SIGSTOP)
        asked = [script(["a"], [number]) for number in range(3)]
        for _ in range(_LOOKS + 1):
            line._look()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert line.is_closed
        server.process.send_signal(signal.SIGCONT)
        assert await script(["a"], [4]) == [b"a", b"4"]

    with_own_server(body)


def test_an_error_of_the_script_is_unavailable_and_the_connection_goes_on(with_redis):
    async def body(redis):
        broken, script = Script(redis, "return redis.error_reply('no')", 30.0), Script(redis, ECHO, 30.0)
        await script(["a"], [1])
        with pytest.raises(StoreUnavailable):
            await broken(["a"], [1])
        with pytest.raises(StoreUnavailable):
            await broken(["a"], [1])
        assert await script(["a"], [2]) == [b"a", b"2"]

    with_redis(body)
