"""Where a webhook may go: what its URL may be, and which addresses of its host may be called.

A tenant names the host, and whoever runs its DNS names the addresses: both are strangers who would like us to call what
only we can reach.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from weakref import WeakValueDictionary

import httpx

MAX_URL_LENGTH = 2048
MIN_PORT = 1024  # but for the scheme's own: well-known ports are other protocols' doors
RESOLVERS = 16  # threads
MAX_LOOKUPS_OF_ONE = 2
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_GLOBAL_IPV6 = ip_network("2000::/3")
# beside what every version of the standard library says is not global: ways into IPv4 (6to4 and its relays, Teredo),
# and what is set apart for protocols and documents
_SET_APART = tuple(
    map(
        ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)

Address = IPv4Address | IPv6Address
Lookup = Callable[[str, int], Iterable[str]]


class BadDestination(Exception):
    """The URL, or where it leads, is not to be called; the message is for its owner."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A checked URL. ``host`` is a name in ASCII or an address."""

    url: httpx.URL
    host: str
    port: int


def destination_of(text: str, *, allow_loopback: bool = False) -> Destination:
    """What a tenant gave as its endpoint. With ``allow_loopback`` (tests) loopback may be called, without TLS too.

    Raises BadDestination.
    """
    try:
        url = httpx.URL(text)
        host = url.raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, ValueError) as error:
        raise BadDestination("is no URL") from error
    if len(str(url)) > MAX_URL_LENGTH:
        raise BadDestination(f"has at most {MAX_URL_LENGTH} characters")
    if "\\" in text or "@" in text.partition("://")[2].partition("/")[0] or url.fragment:
        raise BadDestination("has no credentials, no backslash and no fragment")
    address = _literal(host)
    if address is None and not _NAME.fullmatch(host):
        raise BadDestination("names a host")
    local = allow_loopback and (host == "localhost" or (address is not None and address.is_loopback))
    if url.scheme != "https" and not (local and url.scheme == "http"):
        raise BadDestination("begins with https://")
    port = url.port if url.port is not None else 443
    if not (port == 443 or MIN_PORT <= port <= 65_535):
        raise BadDestination(f"has port 443, or one of {MIN_PORT} to 65535")
    if address is not None and not is_permitted(address, allow_loopback=allow_loopback):
        raise BadDestination("leads to an address that is not public")
    return Destination(url, host, port)


def is_permitted(address: Address, *, allow_loopback: bool = False) -> bool:
    """Whether it is one of the public internet's, for one receiver."""
    if allow_loopback and address.is_loopback:
        return True
    if any(address in network for network in _SET_APART if network.version == address.version):
        return False
    if isinstance(address, IPv6Address) and (address.scope_id or address not in _GLOBAL_IPV6):
        return False  # among the rest: mapped, compatible and NAT64 addresses, ULA, link-local
    return address.is_global and not address.is_multicast and not address.is_reserved


class Resolver:
    """Names → addresses, on threads of its own. A look-up can't be broken off, and a tenant may run the name server:
    who has MAX_LOOKUPS_OF_ONE under way waits for one of its own, so that nobody takes up all threads."""

    def __init__(self, lookup: Lookup | None = None, *, allow_loopback: bool = False) -> None:
        self._lookup = lookup or _look_up
        self._allow_loopback = allow_loopback
        self._threads = ThreadPoolExecutor(RESOLVERS, "webhook-dns")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def address_of(self, destination: Destination, owner: str) -> Address:
        """An address of the host that may be called; IPv4 first, which more hosts can reach. The host is looked up
        once: call this address, not the name. Raises BadDestination, OSError (the name leads nowhere)."""
        found = _literal(destination.host)
        if found is not None:
            return found
        texts = await self._looked_up(destination, owner)
        addresses = sorted(map(ip_address, texts), key=lambda address: address.version)
        for address in addresses:
            if is_permitted(address, allow_loopback=self._allow_loopback):
                return address
        raise BadDestination("leads to no public address")

    async def _looked_up(self, destination: Destination, owner: str) -> list[str]:
        turns = self._turns.setdefault(owner, asyncio.Semaphore(MAX_LOOKUPS_OF_ONE))
        await turns.acquire()
        work = self._threads.submit(lambda: list(self._lookup(destination.host, destination.port)))
        looking = asyncio.wrap_future(work)
        looking.add_done_callback(lambda done: (turns.release(), done.cancelled() or done.exception()))
        return await asyncio.shield(looking)  # the turn is over when the thread is free, however long the caller waits

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> Iterable[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for *_, address in found]


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
