"""Pages and CSV of what tenants have named: shown as text, run nowhere."""

import base64
import csv
import hashlib
import io
import re
from decimal import Decimal
from html.parser import HTMLParser

import pytest

from tenants.csv_text import csv_text
from tenants.page import PAGE_CSP, Column, escape, facts, page, section, table

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</style><style>*{display:none}</style>",
    "</title><h1>Paid</h1>",
    "a&b &lt; &#60;",
]


class Elements(HTMLParser):
    """What a browser would find: tags with their attributes, and the text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        self.text.append(data)


def whole(name: str) -> str:
    return page(name, facts([(name, name)]), section(name, table([name, Column(name, number=True)], [[name, name]])))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text_wherever_it_stands(name):
    plain, hostile = Elements(whole("plain")), Elements(whole(name))

    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(attributes) for _, attributes in hostile.tags] == [sorted(a) for _, a in plain.tags]
    assert hostile.text.count(name) == plain.text.count("plain") == 9


def test_the_policy_allows_the_one_style_sheet_that_the_page_has_and_nothing_else():
    document = page("t")
    (style,) = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    assert f"default-src 'none'; style-src 'sha256-{digest}'" == PAGE_CSP
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": PAGE_CSP}) in Elements(document).tags
    assert "url(" not in style
    assert " style=" not in document


def test_marks_that_reorder_or_hide_text_are_replaced_and_letters_of_any_script_stay():
    assert (
        escape("a\u202eb\u2066c\u200fd\x00e\x9bf\u2028g\ud800") == "a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf\ufffdg\ufffd"
    )
    assert escape("שלום ١٢٣ 漢字 é 👩\u200d💻\n") == "שלום ١٢٣ 漢字 é 👩\u200d💻\n"


def test_a_table_without_a_row_says_so():
    assert "None" in Elements(table(["a", "b"], [])).text


def test_a_heading_of_a_table_is_in_the_part_that_each_printed_page_repeats():
    head = table(["a", Column("b", number=True, heads=True)], [["x", "y"]], heading="Of <it>").split("</thead>")[0]

    assert '<tr class="heading"><th colspan="2">Of &lt;it&gt;</th></tr>' in head
    assert '<th class="number head">b</th>' in head


def test_a_row_with_another_number_of_cells_is_our_bug():
    with pytest.raises(ValueError):
        table(["a", "b"], [["only one"]])
    with pytest.raises(AssertionError):
        csv_text(["a", "b"], [["only one"]])


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_text_that_begins_like_a_formula_is_quoted(start):
    name = f"{start}cmd|' /C calc'!A0"

    rows = list(csv.reader(io.StringIO(csv_text([name], [[name]]), newline="")))

    assert rows == [[f"'{name}"], [f"'{name}"]]


def test_numbers_are_written_as_they_are_and_nothing_else_is():
    text = csv_text(
        ["a", "b", "c", "d", "e"], [[-5, Decimal("-0.10"), None, True, "-5"], [10**30, -1.5, "", False, "x,y"]]
    )

    assert text == "a,b,c,d,e\r\n-5,-0.10,,true,'-5\r\n" + f'{10**30},-1.5,,false,"x,y"\r\n'
