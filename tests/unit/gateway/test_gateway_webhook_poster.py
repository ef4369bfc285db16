"""One POST to a stranger, who may be anything: real sockets, real TLS."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from gateway.webhooks import poster as poster_module
from gateway.webhooks.addresses import Resolver
from gateway.webhooks.poster import Poster
from tenants.deliveries import Attempt
from tests.certificates import certificate_of

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


class Stranger:
    """A server whose every byte the test decides; ``heads`` are the requests that came."""

    def __init__(self, answer: Answer | bytes) -> None:
        self.heads: list[str] = []
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if callable(self._answer):
                await self._answer(reader, writer)
            else:
                writer.write(self._answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def post(
    stranger: Stranger,
    url: str = "http://127.0.0.1:{port}/hook",
    lookups: list[list[str]] | None = None,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
) -> Attempt:
    """What comes of a POST; ``lookups`` are the answers of the name server, one for each question."""

    async def main() -> Attempt:
        server = await asyncio.start_server(stranger.serve, "127.0.0.1", 0, ssl=server_tls)
        port = server.sockets[0].getsockname()[1]
        answers = iter(lookups or [])
        resolver = Resolver(lambda host, _: next(answers), allow_loopback=True)
        poster = Poster(resolver, allow_loopback=True, tls=client_tls)
        try:
            return await poster.post("ten_a", url.format(port=port), {"webhook-id": "evt_1"}, b'{"a":1}')
        finally:
            server.close()
            resolver.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as gateways have it
        return runner.run(main())


def test_any_2xx_is_a_success_and_the_request_is_whole():
    stranger = Stranger(NO_CONTENT)
    assert post(stranger) == Attempt(204)
    (head,) = stranger.heads
    assert head.startswith("POST /hook HTTP/1.1\r\n")
    assert "webhook-id: evt_1" in head.lower()
    assert "content-length: 7" in head.lower()
    assert "authorization" not in head.lower()


def test_a_redirect_is_not_followed():
    elsewhere = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/metadata\r\ncontent-length: 0\r\n\r\n"
    stranger = Stranger(elsewhere)
    assert post(stranger) == Attempt(307)
    assert len(stranger.heads) == 1


def test_an_answer_that_drips_is_cut_off_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(poster_module, "DEADLINE_S", 0.3)

    async def drip(_, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: 1\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    assert post(Stranger(drip)) == Attempt(0, "timeout")


def test_of_a_body_without_end_nothing_is_read():
    sent = 0

    async def flood(_, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n")
        while True:
            writer.write(bytes(65_536))
            sent += 65_536
            await writer.drain()

    assert post(Stranger(flood)) == Attempt(200)
    assert sent < 64 << 20  # what buffers took before the connection was closed


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\x00\r\n\r\n",
        b"HTTP/1.1 999999 Nope\r\n\r\n",
    ],
    ids=["nothing", "another protocol", "an endless head", "a broken header", "a strange status"],
)
def test_what_is_no_answer_is_a_failed_try(answer: bytes):
    assert post(Stranger(answer)) == Attempt(0, "broken_answer")


def test_hostile_headers_of_an_answer_change_nothing():
    hostile = (
        b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\nlocation: http://127.0.0.1:1/\r\nrefresh: 0\r\n"
        b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n"
    )
    assert post(Stranger(hostile)) == Attempt(200)


def test_nobody_there_is_a_failed_try():
    assert post(Stranger(b""), url="http://127.0.0.1:1025/") == Attempt(0, "cannot_connect")


# ── names and certificates ───────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(a server's, a client's that trusts it): of a certificate for hooks.example alone."""
    return _contexts(tmp_path_factory.mktemp("tls"))


def _contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    pem = certificate_of("hooks.example", folder)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cafile=str(pem))


def test_the_checked_address_is_called_under_the_hosts_name_which_is_looked_up_once(tls):
    """A name whose second answer would be an inner address: there is no second question."""
    names = []
    tls[0].sni_callback = lambda _, name, __: names.append(name)
    stranger = Stranger(NO_CONTENT)
    assert post(stranger, "https://hooks.example:{port}/hook", [["127.0.0.1"], ["10.0.0.1"]], *tls) == Attempt(204)
    assert names == ["hooks.example"]
    assert "\r\nhost: hooks.example:" in stranger.heads[0].lower()


def test_a_certificate_of_another_name_is_refused_before_anything_is_sent(tls):
    stranger = Stranger(NO_CONTENT)
    assert post(stranger, "https://other.example:{port}/", [["127.0.0.1"]], *tls) == Attempt(0, "bad_certificate")
    assert stranger.heads == []


def test_a_certificate_that_nobody_vouches_for_is_refused(tls):
    refused = post(Stranger(NO_CONTENT), "https://hooks.example:{port}/", [["127.0.0.1"]], tls[0], None)
    assert refused == Attempt(0, "bad_certificate")


def test_a_name_that_leads_inside_is_refused_when_it_is_called():
    stranger = Stranger(NO_CONTENT)
    assert post(stranger, "https://hooks.example:{port}/", [["10.0.0.1"]]) == Attempt(0, "refused_address")
    assert stranger.heads == []


def test_a_name_that_leads_nowhere_is_a_failed_try():
    def nowhere(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    async def main() -> Attempt:
        resolver = Resolver(nowhere)
        try:
            return await Poster(resolver).post("ten_a", "https://hooks.example/", {}, b"{}")
        finally:
            resolver.close()

    assert asyncio.run(main()) == Attempt(0, "unknown_host")
