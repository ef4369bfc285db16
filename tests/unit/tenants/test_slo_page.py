"""The report's page and its CSV: the report's own numbers, whatever names it is about."""

import csv as csv_reader
import io
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from tenants.errors import InvalidValue
from tenants.slo.charts import ticks
from tenants.slo.page import TABLES, csv, html
from tenants.slo.report import Attainment, Budget, Day, Hour, Latency, ObjectiveRow, Tokens
from tests.slo_reports import NOON_S, report, row

HOSTILE = '<img src=x onerror=alert(1)> "quoted" \u202e & =cmd|x'


class Tags(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_hostile_names_are_text_and_nothing_else():
    page = html(report(row(HOSTILE), tenant_name=HOSTILE))

    tags, plain = Tags(page), Tags(html(report(row("plain"))))
    assert (tags.elements, tags.attributes) == (plain.elements, plain.attributes)
    assert not tags.elements & {"script", "img", "iframe", "link", "object", "form"}
    assert not {name for name in tags.attributes if name.startswith("on") or name in ("style", "src", "href")}
    assert "\u202e" not in page


def test_charts_are_well_formed_images_with_a_name():
    values = [
        Day(f"2030-03-{n}", n, n, {"ttft": Attainment(2, 1, 0.5, 0.1, 0.9)} if n % 3 else {}) for n in range(10, 30)
    ]
    images = re.findall(r"<svg.*?</svg>", html(report(days=values)), re.DOTALL)

    assert len(images) == 3
    for image in images:
        assert ElementTree.fromstring(image).find("{http://www.w3.org/2000/svg}title") is not None
    assert "nan" not in images[0]


def test_a_page_shows_the_numbers_of_the_report():
    shown = row(
        "smollm2",
        valid=1_234_567,
        good=1_000_000,
        attainment={"ttft": Attainment(1_234_567, 1_000_000, 0.810000616, 0.8, 0.82)},
        latency={"ttft": Latency(99, 12_345_678, 10_000_000, 20_000_000, None)},
        tokens=Tokens(1000, 250, 42, 0.25),
        gpu_ns=1_500_000_000,
        price_picousd=10_000_001_000_000_000_001,
    )
    page = html(report(shown))

    for text in ("1,234,567", "81.000 %", "12.3 ms", "20.0 ms", "n/a", "25.0 %", "1.500", "10,000,001.000000000001"):
        assert f">{text}</td>" in page


def test_what_missed_once_is_never_shown_as_all():
    attained = Attainment(3_000_000, 2_999_999, 2_999_999 / 3_000_000, 0.9999, 1.0)

    page = html(report(row("smollm2", attainment={"ttft": attained})))

    assert ">99.999 %</td>" in page
    assert ">100.000 %</td>" not in page


def test_large_numbers_have_no_exponent():
    hour = Hour(NOON_S, Latency(200, 1, 1, 123_456_000_000, None))
    budget = Budget(30, 10**9, 0, 1_234_567.8, 1_234_567.8, 1.0)
    objective = ObjectiveRow(
        name="kept", sli="availability", model="*", flow_class="*", version=1, effective_at=0, threshold_ns=None,
        target=0.999, attainment=Attainment(9, 9, 1.0, 0.9, 1.0), is_met=True, budget=budget,
        burn={"1h": 9999.9, "6h": 0.000012, "1d": None, "3d": 1.0},
    )  # fmt: skip

    page = html(report(hours=[hour], objectives=[objective]))

    assert "100.0 % of 1,234,568<" in page
    assert ">10,000</text>" in page
    assert ">150,000 ms</text>" in page
    assert not re.search(r"[0-9]e[+-]?[0-9]{2}[ <]", page)


def test_bars_of_an_objective_with_a_long_name_are_told_apart():
    budget = Budget(30, 0, 0, 0.0, 0.0, None)
    name = "a-name-that-is-far-too-long-for-the-room-before-a-bar"
    objective = ObjectiveRow(
        name=name, sli="e2e", model="*", flow_class="*", version=1, effective_at=0, threshold_ns=1, target=0.9,
        attainment=Attainment(0, 0, None, None, None), is_met=None, budget=budget,
        burn=dict.fromkeys(("1h", "6h", "1d", "3d"), 0.5),
    )  # fmt: skip

    bars = [text for text in re.findall(r">([^<]*)</text>", html(report(objectives=[objective]))) if "…" in text]

    assert len(set(bars)) == 4


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (0.99, 1.0, [0.99, 0.9925, 0.995, 0.9975, 1]),
        (0.9213, 1.0, [0.92, 0.94, 0.96, 0.98, 1]),
        (0.0, 376.4, [0, 100, 200, 300, 400]),
        (0.0, 90_001.0, [0, 25_000, 50_000, 75_000, 100_000]),
        (0.0, 0.0, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_an_axis_has_round_numbers_around_what_it_shows(low: float, high: float, marks: list[float]):
    assert ticks(low, high) == pytest.approx(marks)


def test_an_axis_has_two_to_five_marks_whatever_it_shows():
    draw = random.Random(5)
    for _ in range(2000):
        low, high = sorted(draw.choice([0.0, draw.uniform(0, 1), 10 ** draw.uniform(-6, 12)]) for _ in "ab")
        marks = ticks(low, high)
        slack = 1e-5 * (marks[1] - marks[0])
        assert 2 <= len(marks) <= 5, (low, high)
        assert marks[0] - slack <= low <= high <= marks[-1] + slack, (low, high)


def test_a_csv_has_a_column_a_field_and_a_row_a_line():
    limited = row("=1+1", excluded={"own_limit": 3}, price_picousd=5)
    total, one, two = csv_reader.DictReader(io.StringIO(csv(report(limited, row("smollm2")))))

    assert (total["model"], total["class"], total["excluded_own_limit"]) == ("", "", "")
    assert (one["model"], one["class"], one["excluded_own_limit"], one["price_picousd"]) == (
        "'=1+1",
        "standard",
        "3",
        "5",
    )
    assert (two["latency_ttft_p50_ns"], two["latency_ttft_count"], two["tokens_cache_hit_ratio"]) == ("n/a", "0", "n/a")


@pytest.mark.parametrize("which", TABLES)
def test_every_part_of_a_report_is_a_csv(which):
    lines = csv(report(row("smollm2")), which).splitlines()

    assert len(lines) == {"rows": 3, "objectives": 1, "incidents": 1, "days": 2, "hours": 2}[which]


def test_another_table_is_refused_by_its_name():
    with pytest.raises(InvalidValue) as refused:
        csv(report(), "secrets")

    assert refused.value.field == "table"


def test_the_json_of_a_report_says_class_and_from():
    told = msgspec.to_builtins(row("smollm2"))

    assert told["class"] == "standard"
    assert "flow_class" not in told
