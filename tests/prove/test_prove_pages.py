"""Invoice pages in a real browser: what stands there is what the JSON says, whatever the tenant is called, and a usual
invoice prints to one page of A4. Needs a Chromium on the PATH."""

import random
import re
import shutil
import subprocess
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from gateway.views.invoices import invoice_body
from tenants.invoices.invoices import Issued
from tenants.invoices.lines import LineKey, Sums, cents_of, rounding_line, usage_lines
from tenants.invoices.text import invoice_page
from tenants.pricing import ADAPTER_METERS, DEFAULT_PRICES, METERS, unit_of
from tenants.tables import Invoice
from tests.invoicing import instant

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


def saved(folder: Path, case: str) -> tuple[Issued, str]:
    issued = invoice_of(*CASES[case])
    (folder / "invoice.html").write_text(invoice_page(issued))
    return issued, f"file://{folder / 'invoice.html'}"


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_the_page_are_those_of_the_json(tmp_path: Path, case: str):
    issued, url = saved(tmp_path, case)

    page = Cells(chromium(tmp_path, "--dump-dom", url))

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


@pytest.mark.parametrize(("case", "num_pages"), [("none", 1), ("one", 1), ("usual", 1), ("long name", 1)])
def test_a_usual_invoice_prints_to_one_page_of_a4(tmp_path: Path, case: str, num_pages: int):
    _, url = saved(tmp_path, case)

    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'out.pdf'}", url)

    printed = (tmp_path / "out.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", printed)) == num_pages
    (box,) = set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", printed))
    assert [round(float(number)) for number in box.split()] in ([0, 0, 595, 842], [0, 0, 596, 842], [0, 0, 594, 841])
