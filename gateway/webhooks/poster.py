"""One POST to a stranger: to the address that was checked, for seconds, hearing no more than a status.

Redirects are not followed, no proxy is asked, no connection is kept: one that was made for one host must not carry
another's request that happens to have the same address.
"""

import asyncio
import functools
import ssl
from collections.abc import Mapping

import httpx

from gateway.webhooks.addresses import BadDestination, Destination, Resolver, destination_of
from tenants.deliveries import Attempt

DEADLINE_S = 5.0  # from the look-up of the name to the end of the answer's head (at most 100 KiB: httpcore's bound)
_USER_AGENT = "Tenora-Webhooks/1"


class Poster:
    """``tls``: for tests; otherwise the certificates that httpx trusts."""

    def __init__(self, resolver: Resolver, *, allow_loopback: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self._resolver = resolver
        self._allow_loopback = allow_loopback
        self._given_tls = tls

    async def post(self, owner: str, url: str, headers: Mapping[str, str], body: bytes) -> Attempt:
        """What came of it for that tenant; never raises for what a stranger does."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                destination = destination_of(url, allow_loopback=self._allow_loopback)
                address = await self._resolver.address_of(destination, owner)
                return Attempt(await self._status(destination, str(address), headers, body))
        except TimeoutError:
            return Attempt(0, "timeout")
        except BadDestination:
            return Attempt(0, "refused_address")
        except httpx.ConnectError as error:
            return Attempt(0, "bad_certificate" if _is_tls(error) else "cannot_connect")
        except httpx.TransportError:
            return Attempt(0, "broken_answer")
        except OSError:
            return Attempt(0, "unknown_host")

    async def _status(self, destination: Destination, address: str, headers: Mapping[str, str], body: bytes) -> int:
        """The name is in Host and in the TLS handshake, and the certificate is checked against it."""
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, retries=0)
        async with httpx.AsyncClient(
            transport=transport, trust_env=False, follow_redirects=False, timeout=DEADLINE_S
        ) as client:
            request = client.build_request(
                "POST",
                destination.url.copy_with(host=address),
                content=body,
                headers={
                    **headers,
                    "host": destination.url.netloc.decode("ascii"),
                    "content-type": "application/json",
                    "user-agent": _USER_AGENT,
                    "accept-encoding": "identity",
                    "connection": "close",
                },
                extensions={"sni_hostname": destination.host.strip("[]")},
            )
            answer = await client.send(request, stream=True)
            await answer.aclose()  # of the body nothing is read, however long or slow it may be
            return answer.status_code

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._given_tls or httpx.create_ssl_context()


def _is_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False
