"""Invoices, credit notes and SLO reports in a browser: what stands there is what the JSON says, whatever the tenant is
called, and they print to as few pages of A4 as they should. Needs a Chromium on the PATH."""

import random
import re
import shutil
import subprocess
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from gateway.views.invoices import credit_note_body, invoice_body
from tenants.invoices.invoices import Issued
from tenants.invoices.lines import LineKey, Sums, cents_of, rounding_line, usage_lines
from tenants.invoices.text import credit_note_page, invoice_page
from tenants.pricing import ADAPTER_METERS, DEFAULT_PRICES, METERS, unit_of
from tenants.slo.objectives import SLIS
from tenants.slo.page import html
from tenants.slo.report import Attainment, Latency, Row, Tokens
from tenants.tables import CreditNote, CreditNoteLine, Invoice
from tests.invoicing import instant
from tests.slo_reports import report, row

pytestmark = pytest.mark.long

START, END = instant("2026-11-01"), instant("2026-12-01")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
HOSTILE = '=cmd|<script>document.title="taken"</script>\u202egnp.exe"><img src=x onerror=alert(1)> שלום'
CASES = {
    "none": (0, "acme"),
    "one": (1, "acme"),
    "usual": (15, "Acme Corporation"),
    "many": (500, "acme"),
    "long name": (3, "W" * 100 + " and sons" * 11 + "!"),
    "hostile name": (3, HOSTILE),
}


def invoice_of(num_lines: int, name: str) -> Issued:
    rng = random.Random(num_lines)
    groups: dict[LineKey, Sums] = {}
    while len(groups) < num_lines:
        meter = rng.choice((*METERS, *ADAPTER_METERS))
        flow_class = "" if meter in ADAPTER_METERS else rng.choice(["interactive", "standard", "batch"])
        key = LineKey(f"adapter-{rng.randrange(100):03}", "smollm2", flow_class, meter, "rc_1", DEFAULT_PRICES[meter])
        units = rng.randint(1, 10**13)
        groups[key] = Sums(units * unit_of(meter), units * key.unit_price_picousd)
    lines = usage_lines(groups, START, END)
    lines.append(rounding_line(lines, START, END))
    for number, line in enumerate(lines, 1):
        line.number = number
    invoice = Invoice(
        invoice_id="inv_0",
        number=7,
        tenant_id="ten_0",
        period="2026-11-01",
        start_unix_ns=START,
        end_unix_ns=END,
        issued_unix_ns=END,
        tenant_name=name,
        time_zone="UTC",
        issuer="Lovelace & Sons",
        total_cents=cents_of(sum(line.amount_picousd for line in lines)),
    )
    return Issued(invoice, lines)


class Cells(HTMLParser):
    """Every cell of the page as the browser holds it, and its other text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.title = ""
        self._open = ""
        self.facts: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self._open = tag
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
        elif tag == "dd":
            self.facts.append("")

    def handle_endtag(self, tag) -> None:
        self._open = ""

    def handle_data(self, data) -> None:
        if self._open == "td":
            self.rows[-1][-1] += data
        elif self._open == "dd":
            self.facts[-1] += data
        elif self._open == "title":
            self.title += data


def chromium(folder: Path, *arguments: str) -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program, "no Chromium on the PATH: install it (Debian: apt-get install chromium)"
    command = [program, *QUIET, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=120, cwd=folder).stdout.decode()


def saved(folder: Path, document: str) -> str:
    (folder / "page.html").write_text(document)
    return f"file://{folder / 'page.html'}"


def printed_pages(folder: Path, document: str) -> int:
    """How many; all are A4."""
    arguments = ("--no-pdf-header-footer", f"--print-to-pdf={folder / 'out.pdf'}")
    chromium(folder, *arguments, saved(folder, document))
    printed = (folder / "out.pdf").read_bytes()
    (box,) = set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", printed))
    assert [round(float(number)) for number in box.split()] in ([0, 0, 595, 842], [0, 0, 596, 842], [0, 0, 594, 841])
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", printed))


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_the_page_are_those_of_the_json(tmp_path: Path, case: str):
    issued = invoice_of(*CASES[case])

    page = Cells(chromium(tmp_path, "--dump-dom", saved(tmp_path, invoice_page(issued))))

    body = msgspec.to_builtins(invoice_body(issued))
    shown = [row for row in page.rows if len(row) == 5]
    wanted = [line for line in body["lines"] if line["kind"] != "rounding" or line["amount"] != "0.00"]
    assert [int(row[0]) for row in shown[:-1]] == [line["number"] for line in wanted]
    amounts = [Decimal(row[4].replace(",", "")) for row in shown]
    assert amounts[:-1] == [Decimal(line["amount"]) for line in wanted]
    assert amounts[-1] == sum(amounts[:-1]) == Decimal(body["total"])
    tokens = [(row, line) for row, line in zip(shown, wanted, strict=False) if line["meter"] in METERS]
    assert [int(row[2].replace(",", "")) for row, _ in tokens] == [line["quantity"] for _, line in tokens]
    assert page.title == "Invoice INV-000007"
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.facts[1] == f"{CASES[case][1].replace(chr(0x202E), chr(0xFFFD))} (ten_0)"


@pytest.mark.parametrize(("case", "num_pages"), [("none", 1), ("one", 1), ("usual", 1), ("long name", 1), ("many", 13)])
def test_a_usual_invoice_prints_to_one_page_of_a4_and_a_long_one_to_no_more_than_it_takes(
    tmp_path: Path, case: str, num_pages: int
):
    assert printed_pages(tmp_path, invoice_page(invoice_of(*CASES[case]))) == num_pages


@pytest.mark.parametrize("case", ["one", "many", "hostile name"])
def test_the_numbers_of_a_credit_note_are_those_of_its_json(tmp_path: Path, case: str):
    issued = invoice_of(*CASES[case])
    lines = [
        CreditNoteLine(credit_note_id="crn_0", invoice_line=line.number, amount_cents=line.amount_cents // 2 + 1)
        for line in issued.lines[::3]
    ]
    note = CreditNote(
        credit_note_id="crn_0",
        number=7,
        invoice_id="inv_0",
        tenant_id="ten_0",
        reason=HOSTILE,
        issued_unix_ns=END,
        currency="USD",
        total_cents=sum(line.amount_cents for line in lines),
    )

    page = Cells(chromium(tmp_path, "--dump-dom", saved(tmp_path, credit_note_page(note, lines, issued))))

    body = msgspec.to_builtins(credit_note_body(note, lines))
    wanted = [(str(line["invoice_line"]), Decimal(line["amount"])) for line in body["lines"]]
    rows = [(row[0], number(row[2])) for row in page.rows if len(row) == 3]
    assert rows == [*wanted, ("", Decimal(body["total"]))]
    assert page.title == "Credit note CN-000007"
    assert not page.tags & {"script", "img"}
    assert page.facts[3] == HOSTILE.replace(chr(0x202E), chr(0xFFFD))


def row_of(model: str, seed: int) -> Row:
    rng = random.Random(seed)
    counts = [rng.randrange(1, 10**9) for _ in range(8)]
    kept = {sli: Attainment(10**9, good := rng.randrange(10**9), good / 10**9, 0.0, 1.0) for sli in SLIS}
    times = {name: Latency(200, *(rng.randrange(10**11) for _ in range(4))) for name in ("ttft", "tpot", "e2e")}
    return row(
        model,
        valid=counts[0],
        good=counts[1],
        excluded={"own_limit": counts[2], "caller_error": counts[3], "left_early": counts[4]},
        attainment=kept,
        latency=times,
        tokens=Tokens(counts[5], counts[6], counts[7], 0.25),
        price_picousd=rng.randrange(10**21),
    )


def number(text: str) -> Decimal:
    return Decimal(re.sub(r"[, %ms]", "", text))


@pytest.mark.parametrize("name", ["acme", CASES["long name"][1], HOSTILE])
def test_the_numbers_of_a_report_are_those_of_its_json(tmp_path: Path, name: str):
    shown = report(row_of(name, 1), row_of("smollm2", 2), tenant_name=name, total=row_of("", 3))

    page = Cells(chromium(tmp_path, "--dump-dom", saved(tmp_path, html(shown))))

    told = msgspec.to_builtins(shown)
    body = [*told["rows"], told["total"]]
    tables = {size: [cells for cells in page.rows if len(cells) == size] for size in (6, 7, 8)}
    counted = [[number(cell) for cell in cells[2:]] for cells in tables[7]]
    assert counted == [[each["valid"], each["good"], *each["excluded"].values()] for each in body]
    for cells, each in zip(tables[6], body, strict=True):
        for cell, sli in zip(cells[2:], ("availability", "ttft", "tpot", "e2e"), strict=True):
            assert 0 <= Decimal(str(100 * each["attainment"][sli]["ratio"])) - number(cell) < Decimal("0.001001")
    times = [cells for cells in tables[8] if cells[2] in ("TTFT", "TPOT", "E2E")]
    used = [cells for cells in tables[8] if cells not in times]
    assert [(*map(number, cells[2:5]), number(cells[7]).scaleb(12)) for cells in used] == [
        (*(each["tokens"][kind] for kind in ("input", "cached", "output")), each["price_picousd"]) for each in body
    ]
    latencies = [time for each in (body[-1], *body[:-1]) for time in each["latency"].values()]
    for cells, time in zip(times, latencies, strict=True):
        assert number(cells[3]) == time["count"]
        for cell, value in zip(cells[4:], ("mean_ns", "p50_ns", "p95_ns", "p99_ns"), strict=True):
            assert abs(number(cell) - Decimal(time[value]) / 10**6) <= Decimal("0.05")
    assert not page.tags & {"script", "img"}
    assert page.facts[0] == f"{name.replace(chr(0x202E), chr(0xFFFD))} (ten_a)"


def test_an_empty_report_prints_to_two_pages_of_a4(tmp_path: Path):
    assert printed_pages(tmp_path, html(report())) == 2
