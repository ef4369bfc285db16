"""OpenSLO documents: what goes in comes out, and what is hostile or not kept is refused by its name."""

import json
from dataclasses import replace

import pytest
import yaml

from tenants.errors import InvalidValue
from tenants.slo.openslo import MAX_DOCUMENT_BYTES, read, write
from tests.slo_requests import objective

DRAFT = {"version_id": "", "version": 0, "effective_unix_ns": 0}
EVERY = [
    objective("availability", target=0.999, name="up", window_days=28, **DRAFT),
    objective("ttft", 500, model="support", flow_class="interactive", name="first", description="näher: 日本", **DRAFT),
    objective("tpot", 50, target=0.9, flow_class="batch", **DRAFT),
    objective("e2e", 30_000, target=0.999999, **DRAFT),
]
TEXT = """
apiVersion: openslo/v1
kind: SLO
metadata:
  name: first-token
spec:
  description: Chats begin soon.
  service: tenora
  indicator:
    metadata:
      name: first-token
    spec:
      thresholdMetric:
        metricSource:
          type: tenora
          spec: {sli: ttft, tenant: ten_a, model: support, class: interactive}
  timeWindow:
    - duration: 30d
      isRolling: true
  budgetingMethod: Occurrences
  objectives:
    - op: lte
      value: 0.25
      target: 0.95
"""


def changed(path: str, value) -> bytes:
    """TEXT as JSON with one value set; ``path`` names fields, numbers are places in lists."""
    document = yaml.safe_load(TEXT)
    place = document
    *way, last = (int(name) if name.isdigit() else name for name in path.split("."))
    for name in way:
        place = place[name]
    place[last] = value
    return json.dumps(document).encode()


def test_a_document_says_what_was_promised():
    (found,) = read(TEXT.encode())

    assert (found.tenant_id, found.model, found.flow_class, found.sli) == ("ten_a", "support", "interactive", "ttft")
    assert (found.threshold_ns, found.target_ppm, found.window_days) == (250_000_000, 950_000, 30)
    assert (found.name, found.description) == ("first-token", "Chats begin soon.")


def test_what_is_written_is_read_back():
    assert read(write(EVERY).encode()) == EVERY
    assert write(read(write(EVERY).encode())) == write(EVERY)


def test_what_is_written_is_plain_yaml_of_the_standard():
    documents = list(yaml.safe_load_all(write(EVERY)))

    assert [each["kind"] for each in documents] == ["SLO"] * 4
    assert {each["apiVersion"] for each in documents} == {"openslo/v1"}
    assert all(each["spec"]["objectives"][0]["target"] for each in documents)


def test_json_is_taken_alone_and_as_a_list():
    one = yaml.safe_load(TEXT)
    two = yaml.safe_load(write(EVERY[2:3]))

    assert read(json.dumps(one).encode()) == read(TEXT.encode())
    assert [each.sli for each in read(json.dumps([one, two]).encode())] == ["ttft", "tpot"]


@pytest.mark.parametrize("place", range(1, 200, 7))
def test_targets_and_thresholds_keep_every_digit(place):
    exact = replace(EVERY[1], target_ppm=place * 5000 - 1, threshold_ns=place * 1_234_567 + 1)

    assert read(write([exact]).encode()) == [exact]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("surprise", 1, "surprise"),
        ("metadata.displayName", "x", "displayName"),
        ("spec.alertPolicies", [], "alertPolicies"),
        ("spec.budgetingMethod", "Timeslices", "budgetingMethod"),
        ("spec.service", "other", "service"),
        ("spec.timeWindow.0.calendar", {}, "calendar"),
        ("spec.timeWindow.0.isRolling", False, "isRolling"),
        ("spec.timeWindow.0.duration", "99d", "timeWindow"),
        ("spec.timeWindow.0.duration", "1w", "duration"),
        ("spec.objectives", [], "objectives"),
        ("spec.objectives.0.op", "gt", "op"),
        ("spec.objectives.0.op", None, "op"),
        ("spec.objectives.0.target", 1, "target"),
        ("spec.objectives.0.target", 0, "target"),
        ("spec.objectives.0.target", 0.1234567, "target"),
        ("spec.objectives.0.target", True, "target"),
        ("spec.objectives.0.value", -1, "value"),
        ("spec.objectives.0.value", 1e-10, "value"),
        ("spec.objectives.0.value", 1e9, "value"),
        ("spec.objectives.0.targetPercent", 95, "targetPercent"),
        ("spec.indicator.spec.thresholdMetric.metricSource.spec.sli", "speed", "sli"),
        ("spec.indicator.spec.thresholdMetric.metricSource.spec.sli", "availability", "ratioMetric"),
        ("spec.indicator.spec.thresholdMetric.metricSource.spec.class", "vip", "class"),
        ("spec.indicator.spec.thresholdMetric.metricSource.spec.model", "a@1", "model"),
        ("spec.indicator.spec.thresholdMetric.metricSource.spec.query", "x", "query"),
        ("spec.indicator.spec.thresholdMetric", None, "thresholdMetric"),
        ("metadata.name", "Not A Name", "name"),
        ("kind", "Service", "kind"),
    ],
)
def test_what_is_not_kept_is_refused_by_its_name(path, value, named):
    with pytest.raises(InvalidValue, match=named):
        read(changed(path, value))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"a: &x 1\nb: 2", "anchors"),
        (b"a: &x [1]\nb: *x", "anchors"),
        (b"- &x a\n- *x", "anchors"),
        (b"a: {<<: {b: 1}}", "merge"),
        (b"a: 1\na: 2", "a twice"),
        (b"[" * 5000, "nested"),
        (b"{a: " * 5000, "nested"),
        (b"x: !!python/object/apply:os.system [true]", "python"),
        (b"x: !!python/name:os.system", "python"),
        (b"x: " + b"9" * 5000, "value"),
        (b"\xff\xfe", "UTF-8"),
        (b"", "documents"),
        (b"[]", "documents"),
        (b"null", "Expected"),
        (b"a: [", "expected"),
        (b"{}\n---\n" * 101, "documents"),
        (b" " * (MAX_DOCUMENT_BYTES + 1), "larger"),
        ((TEXT + "---" + TEXT).encode(), "two objectives"),
    ],
)
def test_hostile_text_is_refused_without_a_look_at_it(text, named):
    with pytest.raises(InvalidValue, match=named):
        read(text)


def test_a_ratio_has_one_scope():
    document = yaml.safe_load(write(EVERY[:1]))
    document["spec"]["indicator"]["spec"]["ratioMetric"]["good"]["metricSource"]["spec"]["tenant"] = "ten_b"

    with pytest.raises(InvalidValue, match="one spec"):
        read(json.dumps(document).encode())
