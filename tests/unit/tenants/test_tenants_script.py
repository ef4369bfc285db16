"""A script's calls on a real Valkey: one connection, many at once, each with its own answer."""

import asyncio
import contextlib
import signal
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from stores import valkey_server

from tenants.errors import StoreUnavailable
from tenants.patience import LOOKS
from tenants.quota.script import Script
from tests.certificates import certificate_of

ECHO = "return {KEYS[1], ARGV[1]}"


async def kill_all_but_own_connection(redis):
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def with_own_server(body):
    """Runs ``body(server, script)`` on a store that it may stop and kill."""

    async def main():
        with valkey_server() as server:
            async with Redis.from_url(server.url) as redis:
                with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
                    await body(server, script)

    asyncio.run(main())


def test_calls_at_once_share_a_connection_and_each_gets_its_own_answer(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
            before = int((await redis.info("clients"))["connected_clients"])
            answers = await asyncio.gather(*(script([f"key-{number}"], [number]) for number in range(200)))
            assert answers == [[b"key-%d" % number, b"%d" % number] for number in range(200)]
            assert int((await redis.info("clients"))["connected_clients"]) == before + 1

    with_redis(body)


def test_a_call_that_is_not_awaited_any_more_leaves_the_others_their_answers(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
            await script(["a"], [0])
            calls = [script(["a"], [number]) for number in range(3)]
            calls[1].cancel()
            first, gone, third = await asyncio.gather(*calls, return_exceptions=True)
            assert (first, third) == ([b"a", b"0"], [b"a", b"2"])
            assert isinstance(gone, asyncio.CancelledError)

    with_redis(body)


def test_a_call_whose_answer_nobody_awaits_is_made_before_those_behind_it(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, "return redis.call('INCR', KEYS[1])", 30.0)) as script:
            assert await script(["a"], []) == 1
            script(["a"], [])
            assert await script(["a"], []) == 3

    with_redis(body)


def test_a_store_that_was_emptied_of_scripts_is_given_it_again(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
            await redis.script_flush()
            assert await script(["a"], [1]) == [b"a", b"1"]
            await redis.script_flush()
            assert await script(["a"], [2]) == [b"a", b"2"]

    with_redis(body)


def test_a_call_behind_a_broken_connection_makes_another(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
            assert await script(["a"], [1]) == [b"a", b"1"]
            for number in range(3):
                await kill_all_but_own_connection(redis)
                with contextlib.suppress(StoreUnavailable):  # it may not have heard yet
                    await script(["a"], [number])
                assert await script(["a"], [number]) == [b"a", b"%d" % number]

    with_redis(body)


def test_a_process_that_stood_still_while_it_connected_does_not_take_the_store_for_away(with_redis):
    async def body(redis):
        with contextlib.closing(Script(redis, ECHO, 1.0)) as script:
            asked = script(["a"], [1])
            await asyncio.sleep(0)
            time.sleep(1.2)  # what a busy machine does to a process
            assert await asked == [b"a", b"1"]

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
        for _ in range(LOOKS):
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
        for _ in range(LOOKS + 1):
            line._look()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert line.is_closed
        server.process.send_signal(signal.SIGCONT)
        assert await script(["a"], [4]) == [b"a", b"4"]

    with_own_server(body)


def test_an_error_of_the_script_is_unavailable_and_the_connection_goes_on(with_redis):
    async def body(redis):
        with (
            contextlib.closing(Script(redis, "return redis.error_reply('no')", 30.0)) as broken,
            contextlib.closing(Script(redis, ECHO, 30.0)) as script,
        ):
            await script(["a"], [1])
            with pytest.raises(StoreUnavailable):
                await broken(["a"], [1])
            with pytest.raises(StoreUnavailable):
                await broken(["a"], [1])
            assert await script(["a"], [2]) == [b"a", b"2"]

    with_redis(body)


# ── where the store is, and who we are there ─────────────────────────────────────────────────────


def test_a_store_that_wants_a_password_is_called_in_the_database_that_its_address_names():
    async def body(server, _):
        async with Redis.from_url(server.url) as owner:
            await owner.config_set("requirepass", "secret")
        async with Redis.from_url(f"{server.url}?db=2&password=secret") as redis:
            with contextlib.closing(Script(redis, "return redis.call('INCR', KEYS[1])", 30.0)) as script:
                assert await script(["a"], []) == 1
            assert await redis.get("a") == b"1"

    with_own_server(body)


def test_a_store_that_does_not_know_us_is_unavailable_and_leaves_no_connection():
    async def body(server, _):
        async with Redis.from_url(server.url) as owner:
            async with Redis.from_url(f"{server.url}?password=wrong&username=nobody") as stranger:
                with contextlib.closing(Script(stranger, ECHO, 30.0)) as script, pytest.raises(StoreUnavailable):
                    await script(["a"], [])
            while int((await owner.info("clients"))["connected_clients"]) > 1:
                await asyncio.sleep(0)

    with_own_server(body)


@contextlib.asynccontextmanager
async def behind_tls(server, folder: Path) -> AsyncIterator[str]:
    """The address under which that store is reached by TLS, with the certificate that vouches for it."""

    async def pump(reader, writer) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)

    async def serve(reader, writer) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(server.socket_path)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    pem = certificate_of("localhost", folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"rediss://localhost:{port}?ssl_ca_certs={pem}"


def test_a_store_behind_tls_is_called_through_it(valkey, tmp_path):
    async def main() -> None:
        async with behind_tls(valkey, tmp_path) as url, Redis.from_url(url) as redis:
            with contextlib.closing(Script(redis, ECHO, 30.0)) as script:
                assert await script(["a"], [1]) == [b"a", b"1"]

    asyncio.run(main())


def test_a_store_whose_certificate_nobody_vouches_for_is_unavailable(valkey, tmp_path):
    async def main() -> None:
        async with behind_tls(valkey, tmp_path) as url, Redis.from_url(url.partition("?")[0]) as redis:
            with contextlib.closing(Script(redis, ECHO, 30.0)) as script, pytest.raises(StoreUnavailable):
                await script(["a"], [1])

    asyncio.run(main())
