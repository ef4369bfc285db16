"""Objectives: what a tenant was promised for a model and a class, each a line of versions in time."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Sli: TypeAlias = Literal["availability", "ttft", "tpot", "e2e"]

SLIS: tuple[Sli, ...] = get_args(Sli)
ANY = "*"
MINUTE_S = 60
MINUTE_NS = MINUTE_S * 10**9
PPM = 10**6
NOTICE_NS = 10 * 10**9  # an objective is written before it is in force, whatever its commit takes


@dataclass(frozen=True, slots=True)
class Objective:
    """One version of one objective. ``target_ppm`` of the valid requests shall be good, over ``window_days``.

    Good is ≤ ``threshold_ns``; availability has none (0). ``model`` is the name that callers ask for, or the base
    model's. In force from ``effective_unix_ns``, a whole minute, until the next version is; ``retired``: none is.
    """

    version_id: str
    tenant_id: str
    model: str
    flow_class: str
    sli: Sli
    version: int
    effective_unix_ns: int
    threshold_ns: int
    target_ppm: int
    window_days: int
    name: str
    description: str = ""
    retired: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What its versions have in common."""
        return self.tenant_id, self.model, self.flow_class, self.sli


class Objectives:
    """Every version of some tenants' objectives."""

    def __init__(self, versions: Iterable[Objective] = ()) -> None:
        self._lines: dict[tuple[str, str, str, str], list[Objective]] = defaultdict(list)
        for each in sorted(versions, key=lambda objective: objective.version):
            self._lines[each.key].append(each)
        self._changes = sorted({each.effective_unix_ns for line in self._lines.values() for each in line})
        self._found: dict[tuple[int, str, tuple[str, ...], str], dict[Sli, Objective]] = {}

    def in_force(self, tenant_id: str, models: tuple[str, ...], flow_class: str, unix_ns: int) -> dict[Sli, Objective]:
        """For each SLI the closest one: ``models`` in their order before any model, its class before any class. The
        same dict for all instants between two changes: not to be written to."""
        asked = bisect_right(self._changes, unix_ns), tenant_id, models, flow_class
        found = self._found.get(asked)
        if found is None:
            found = self._found[asked] = self._closest(tenant_id, models, flow_class, unix_ns)
        return found

    def _closest(self, tenant_id: str, models: tuple[str, ...], flow_class: str, unix_ns: int) -> dict[Sli, Objective]:
        scopes = [(model, each) for model in (*models, ANY) for each in (flow_class, ANY)]
        found: dict[Sli, Objective] = {}
        for sli in SLIS:
            candidates = (self._at((tenant_id, *scope, sli), unix_ns) for scope in scopes)
            closest = next((each for each in candidates if each is not None), None)
            if closest is not None:
                found[sli] = closest
        return found

    def _at(self, key: tuple[str, str, str, str], unix_ns: int) -> Objective | None:
        """Of a line the last version that is in force by then, unless that one ends it."""
        current = None
        for each in self._lines.get(key, ()):
            if each.effective_unix_ns <= unix_ns:
                current = each
        return None if current is None or current.retired else current


def effective_from(now_ns: int) -> int:
    """When a version that is written now comes into force: with a minute, and not before every process sees it."""
    return -(-(now_ns + NOTICE_NS) // MINUTE_NS) * MINUTE_NS


def minute_of(unix_ns: int) -> int:
    """The minute of an instant, as Unix seconds of its start."""
    return unix_ns // MINUTE_NS * MINUTE_S
