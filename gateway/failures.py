"""Failed authentications by peer address: a bucket each, in bounded memory."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from litestar.types import Scope

MAX_FAILURES = 100  # at once; as many come back in a minute
MAX_ADDRESSES = 65_536
_MINUTE_S = 60.0


class FailedAttempts:
    """``record`` counts a failure and says when an address has failed too often; ``forgive`` takes one back.

    It slows down who guesses, and hurts nobody else: a known key is never counted nor refused, whatever else comes from
    its address (a proxy's, say). Of more addresses than are remembered, those that failed least lately are forgotten.
    """

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        max_addresses: int = MAX_ADDRESSES,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._max_addresses = max_addresses
        self._clock_s = clock_s
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address → failures left, as of when

    def __len__(self) -> int:
        return len(self._seen)

    def record(self, address: str) -> float | None:
        """A failure from there. None: it is told so; else seconds until the next one is, and this wasn't counted."""
        now_s, each_s = self._clock_s(), _MINUTE_S / self._max_failures
        left, then_s = self._seen.pop(address, (self._max_failures, now_s))
        left = min(self._max_failures, left + max(0.0, now_s - then_s) / each_s)
        allowed = left >= 1
        self._seen[address] = (left - allowed, now_s)
        if len(self._seen) > self._max_addresses:
            self._seen.popitem(last=False)
        return None if allowed else (1 - left) * each_s

    def forgive(self, address: str) -> None:
        """What was recorded was none."""
        if address in self._seen:
            left, then_s = self._seen[address]
            self._seen[address] = (min(self._max_failures, left + 1), then_s)


def peer_of(scope: Scope) -> str:
    """The address to count by: of IPv6 the network of 64 bits, which one host owns; '' for a unix socket's peer."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
