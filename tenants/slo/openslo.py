"""Objectives as OpenSLO v1 documents (github.com/OpenSLO/OpenSLO), YAML or JSON, in and out.

Of the standard we take what we keep: one rolling window, occurrences, one objective a document. What a document says
beyond that is refused by its name, so that nobody believes in a promise that isn't watched. Seconds are the unit of
``value``.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from tenants.errors import InvalidValue
from tenants.slo.objectives import ANY, PPM, Objective, Sli

MAX_DOCUMENT_BYTES = 64 << 10
MAX_DOCUMENTS = 100
MAX_WINDOW_DAYS = 90
_MAX_DEPTH = 20
_NS = 10**9
_MAX_THRESHOLD_S = 86_400

_Name = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_Model = Annotated[str, Meta(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f@]+$")]
_Share = Annotated[float, Meta(gt=0, lt=1)]


class _Closed(Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _Scope(_Closed):
    """Whose requests. ``class`` is a word of Python's."""

    sli: Sli
    tenant: Annotated[str, Meta(min_length=1, max_length=28)]
    model: _Model = ANY
    flow_class: Literal["interactive", "standard", "batch", "*"] = msgspec.field(default="*", name="class")


class _Source(_Closed):
    type: Literal["tenora"]
    spec: _Scope


class _Metric(_Closed):
    metricSource: _Source


class _Ratio(_Closed):
    counter: Literal[True]
    good: _Metric
    total: _Metric


class _IndicatorSpec(_Closed):
    thresholdMetric: _Metric | None = None
    ratioMetric: _Ratio | None = None


class _Metadata(_Closed):
    name: _Name


class _Indicator(_Closed):
    metadata: _Metadata
    spec: _IndicatorSpec


class _Window(_Closed):
    duration: Annotated[str, Meta(pattern=r"^[1-9][0-9]?d$")]
    isRolling: Literal[True]


class _Target(_Closed):
    target: _Share
    op: Literal["lte"] | None = None
    value: Annotated[float, Meta(gt=0, le=_MAX_THRESHOLD_S)] | None = None


class _Spec(_Closed):
    service: Literal["tenora"]
    indicator: _Indicator
    timeWindow: Annotated[list[_Window], Meta(min_length=1, max_length=1)]
    budgetingMethod: Literal["Occurrences"]
    objectives: Annotated[list[_Target], Meta(min_length=1, max_length=1)]
    description: Annotated[str, Meta(max_length=256)] = ""


class _Document(_Closed):
    apiVersion: Literal["openslo/v1"]
    kind: Literal["SLO"]
    metadata: _Metadata
    spec: _Spec


def read(text: bytes) -> list[Objective]:
    """The objectives of a stream of YAML documents, of which JSON is one kind; a JSON list of documents too. They have
    no version yet. Raises InvalidValue."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidValue("document", f"is larger than {MAX_DOCUMENT_BYTES} bytes")
    documents = _plain(text)
    if not 1 <= len(documents) <= MAX_DOCUMENTS:
        raise InvalidValue("document", f"holds 1 to {MAX_DOCUMENTS} documents")
    objectives = [_objective(document) for document in documents]
    if len({each.key for each in objectives}) < len(objectives):
        raise InvalidValue("document", "has two objectives for one tenant, model, class and sli")
    return objectives


def write(objectives: Iterable[Objective]) -> str:
    """A stream of YAML documents that ``read`` takes; the same text for the same objectives."""
    documents = [msgspec.to_builtins(_document(each)) for each in objectives]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, since the reader takes none."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """Plain values only: no aliases (a few bytes of them make gigabytes), no anchors, merges, or keys given twice."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise InvalidValue("document", f"line {event.start_mark.line + 1}: anchors and aliases are not taken")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise InvalidValue("document", "is nested too deeply")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def flatten_mapping(self, node: Any) -> None:
        known: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise InvalidValue("document", "merge keys are not taken")
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise InvalidValue("document", f"has the key {key.value} twice")
            known.add(str(key.value))


def _plain(text: bytes) -> list[Any]:
    try:
        documents = list(yaml.load_all(text.decode(), Loader=_Loader))
    except UnicodeDecodeError:
        raise InvalidValue("document", "is not UTF-8") from None
    except yaml.YAMLError as error:
        raise InvalidValue("document", " ".join(str(error).split())[:300]) from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidValue("document", f"has a value that can't be read: {str(error)[:200]}") from None
    return documents[0] if len(documents) == 1 and isinstance(documents[0], list) else documents


# ── meaning ──────────────────────────────────────────────────────────────────────────────────────


def _objective(plain: Any) -> Objective:
    try:
        document = msgspec.convert(plain, _Document)
    except msgspec.ValidationError as error:
        raise InvalidValue("document", str(error)) from None
    spec, target = document.spec, document.spec.objectives[0]
    scope = _scope(spec.indicator.spec)
    return Objective(
        version_id="",
        tenant_id=scope.tenant,
        model=scope.model,
        flow_class=scope.flow_class,
        sli=scope.sli,
        version=0,
        effective_unix_ns=0,
        threshold_ns=_threshold_ns(scope.sli, target),
        target_ppm=_whole(target.target, PPM, "target"),
        window_days=_days(spec.timeWindow[0].duration),
        name=document.metadata.name,
        description=spec.description,
    )


def _scope(indicator: _IndicatorSpec) -> _Scope:
    """Availability is a ratio, everything else has a threshold."""
    threshold, ratio = indicator.thresholdMetric, indicator.ratioMetric
    if (threshold is None) == (ratio is None):
        raise InvalidValue("document", "has either thresholdMetric or ratioMetric at $.spec.indicator.spec")
    if threshold is not None:
        scope = threshold.metricSource.spec
        if scope.sli == "availability":
            raise InvalidValue("document", "availability is a ratioMetric")
        return scope
    assert ratio is not None
    scope = ratio.total.metricSource.spec
    if ratio.good.metricSource.spec != scope:
        raise InvalidValue("document", "good and total of the ratioMetric have one spec")
    if scope.sli != "availability":
        raise InvalidValue("document", f"{scope.sli} is a thresholdMetric")
    return scope


def _threshold_ns(sli: Sli, target: _Target) -> int:
    if sli == "availability":
        if target.value is not None or target.op is not None:
            raise InvalidValue("document", "availability has neither op nor value")
        return 0
    if target.value is None or target.op is None:
        raise InvalidValue("document", f"{sli} needs op: lte and a value in seconds")
    return _whole(target.value, _NS, "value")


def _whole(value: float, unit: int, name: str) -> int:
    """In units, exactly as it is written."""
    exact = Decimal(repr(value)) * unit
    if exact != int(exact) or not exact:
        raise InvalidValue("document", f"{name} {value} is no whole number of 1/{unit}")
    return int(exact)


def _days(duration: str) -> int:
    days = int(duration[:-1])
    if days > MAX_WINDOW_DAYS:
        raise InvalidValue("document", f"timeWindow is at most {MAX_WINDOW_DAYS}d")
    return days


def _document(objective: Objective) -> _Document:
    scope = _Scope(objective.sli, objective.tenant_id, objective.model, objective.flow_class)  # pyright: ignore[reportArgumentType]
    metric = _Metric(_Source("tenora", scope))
    if objective.sli == "availability":
        indicator, target = (
            _IndicatorSpec(ratioMetric=_Ratio(True, metric, metric)),
            _Target(objective.target_ppm / PPM),
        )
    else:
        indicator = _IndicatorSpec(thresholdMetric=metric)
        target = _Target(objective.target_ppm / PPM, "lte", objective.threshold_ns / _NS)
    spec = _Spec(
        service="tenora",
        indicator=_Indicator(_Metadata(objective.name), indicator),
        timeWindow=[_Window(f"{objective.window_days}d", True)],
        budgetingMethod="Occurrences",
        objectives=[target],
        description=objective.description,
    )
    return _Document("openslo/v1", "SLO", _Metadata(objective.name), spec)
