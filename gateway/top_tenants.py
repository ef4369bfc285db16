"""Which tenants are named in metrics: few, whoever comes."""

from collections import Counter

OTHER = "other"
BUSIEST = 20
MAX_NAMED = 100
MAX_COUNTED = 10_000


class TopTenants:
    """A tenant is named once it is among the BUSIEST of this process, and from then on, so that its counters never
    fall; at most MAX_NAMED are. All others are one: ``other``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()

    def label(self, tenant_id: str) -> str:
        """Counts a request of the tenant, and says what it is called."""
        self._counts[tenant_id] += 1
        if tenant_id in self._named:
            return tenant_id
        if len(self._counts) > MAX_COUNTED:
            self._counts = Counter(dict(self._counts.most_common(MAX_COUNTED // 2)))
        if len(self._named) == MAX_NAMED or not self._is_busy(self._counts[tenant_id]):
            return OTHER
        self._named.add(tenant_id)
        return tenant_id

    def _is_busy(self, num_requests: int) -> bool:
        return sum(self._counts[named] >= num_requests for named in self._named) < BUSIEST
