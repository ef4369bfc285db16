"""The report's page and its CSV: the report's own numbers, whatever names it is about."""

import csv as csv_reader
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from tenants.errors import InvalidValue
from tenants.slo.page import TABLES, csv, html
from tenants.slo.report import Attainment, Day, Hour, Latency, Phase, Report, Row, Tokens
from tenants.slo.verdict import PHASES

NOON_S = 1_900_000_800
HOSTILE = '<img src=x onerror=alert(1)> "quoted" \u202e & =cmd|x'
NOTHING = Latency(0, None, None, None, None)


def row(model: str | None = None, **changes) -> Row:
    values = {
        "model": model,
        "flow_class": model and "standard",
        "valid": 0,
        "good": 0,
        "goodput": 0.0,
        "excluded": {},
        "refused": {},
        "attainment": {},
        "latency": dict.fromkeys(("ttft", "tpot", "e2e"), NOTHING),
        "phases": dict.fromkeys(PHASES, Phase(None, None)),
        "tokens": Tokens(0, 0, 0, None),
        "gpu_ns": 0,
        "price_picousd": 0,
    }
    return Row(**values | changes)


def report(*rows: Row, **changes) -> Report:
    values = {
        "tenant_id": "ten_a",
        "tenant_name": "Acme",
        "time_zone": "UTC",
        "start": NOON_S,
        "end": NOON_S + 3600,
        "local_start": "2030-03-17T20:00:00+00:00",
        "local_end": "2030-03-17T21:00:00+00:00",
        "generated_at": NOON_S + 7200,
        "elapsed_ratio": 1.0,
        "complete_until": None,
        "total": row(),
        "rows": list(rows),
        "objectives": [],
        "incidents": [],
        "days": [Day("2030-03-17", NOON_S, NOON_S + 3600, {})],
        "hours": [Hour(NOON_S, NOTHING)],
        "objectives_hash": "",
        "document_hash": "f" * 64,
    }
    return Report(**values | changes)


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

    for text in ("1,234,567", "81 %", "12.3 ms", "20.0 ms", "n/a", "25 %", "1.500", "10,000,001.000000000001"):
        assert f">{text}</td>" in page


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
