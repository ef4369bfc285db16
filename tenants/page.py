"""A whole HTML document without a script: invoices and reports on a screen, on a phone, and printed on A4.

Whatever a caller chose goes through ``escape``. Nothing else but the one style sheet below is allowed in a page, so
that markup which slips through could still load, run and send nothing.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STYLE = """
:root { color-scheme: light; --ink: #1a1d21; --soft: #5c6570; --line: #d9dee3; --back: #f5f7f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.5rem; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0 0 1rem; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; unicode-bidi: isolate; }
table { width: 100%; border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; unicode-bidi: isolate; }
th { font-size: .85rem; font-weight: 600; color: var(--soft); background: var(--back); }
.heading th { padding: 0 0 .5rem; font-size: 1.1rem; color: var(--ink); background: none; border: 0;
  overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; width: 1%; }
.total td { font-weight: 700; border-top: 2px solid var(--ink); }
.none { color: var(--soft); text-align: center; }
svg { display: block; width: 100%; height: auto; margin: .5rem 0 1rem; }
footer { margin-top: 2rem; color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
@media screen and (max-width: 40rem) {
  body { padding: 1rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .5rem; }
  table, thead, tbody { display: block; }
  thead tr { display: none; }
  thead .heading { display: block; }
  tbody tr { border: 1px solid var(--line); border-radius: .4rem; margin-bottom: .6rem; padding: .3rem .6rem;
    display: flex; flex-direction: column; }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .15rem 0; text-align: right;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; max-width: 50%; }
  td.none { justify-content: center; }
  td.head { order: -1; font-weight: 600; text-align: left; }
  td.head::before { content: none; }
  td:empty { display: none; }
  .number { white-space: normal; width: auto; }
  svg text { font-size: 18px; }
  .total { border: 2px solid var(--ink); }
  .total td { border: 0; }
}
@media print {
  @page { size: A4; margin: 14mm 14mm 18mm;
    @bottom-right { content: "Page " counter(page) " of " counter(pages); font: 7.5pt sans-serif; color: #5c6570; } }
  html { font-size: 11px; }
  body { max-width: none; padding: 0; font-size: 8.5pt; line-height: 1.4; }
  th, td { padding: .25rem .4rem; }
  h2, tr, svg, footer { break-inside: avoid; }
  h2 { break-after: avoid; }
  .total, footer { break-before: avoid; }
  h2 { margin: 1.4rem 0 .3rem; }
  svg { margin: .3rem 0 .6rem; }
  thead { display: table-header-group; }
}
"""

STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
PAGE_CSP = f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'"

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_KEPT = "\t\n\r"
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_BREAKS = frozenset("\u2028\u2029")


@dataclass(frozen=True, slots=True)
class Column:
    """``number``: its cells are set to the right and never broken. ``heads``: on a narrow screen, where a row is a
    card, its cell stands first and needs no name."""

    name: str
    number: bool = False
    heads: bool = False


def escape(text: str) -> str:
    """For element text and quoted attributes. What could reorder or hide the text around it (controls, direction
    marks, lone surrogates) becomes U+FFFD; letters of any script stay."""
    return html.escape("".join(_REPLACED if _is_unsafe(char) else char for char in text), quote=True)


def page(title: str, *sections: str) -> str:
    """The document; ``title`` is text, ``sections`` are markup. Send it with the header
    ``Content-Security-Policy: PAGE_CSP``; a saved copy has the same as its meta."""
    shown = escape(title)
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{PAGE_CSP}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{shown}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{shown}</h1>",
            *sections,
            "</body>\n</html>\n",
        )
    )


def section(heading: str, *parts: str) -> str:
    """``heading`` is text, ``parts`` are markup."""
    return "\n".join((f"<section>\n<h2>{escape(heading)}</h2>", *parts, "</section>"))


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names with their values, both text."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs)
    return "<dl>\n" + "\n".join(rows) + "\n</dl>"


def table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[object]], total: Sequence[object] = (), heading: str = ""
) -> str:
    """Cells are text; None is an empty one. Without a row it says so. ``total``: a last row that stands out;
    ``heading``: stands above, on each printed page. On a narrow screen each row is a card with its columns' names."""
    shaped = [column if isinstance(column, Column) else Column(column) for column in columns]
    head = "".join(f"<th{_class(column)}>{escape(column.name)}</th>" for column in shaped)
    body = [_row(shaped, row) for row in rows]
    if not body:
        body = [f'<tr><td class="none" colspan="{len(shaped)}">None</td></tr>']
    if total:
        body.append(_row(shaped, total, ' class="total"'))
    above = f'<tr class="heading"><th colspan="{len(shaped)}">{escape(heading)}</th></tr>' if heading else ""
    return f"<table>\n<thead>{above}<tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n</table>"


def _row(columns: Sequence[Column], row: Sequence[object], attribute: str = "") -> str:
    cells = (
        f'<td{_class(column)} data-label="{escape(column.name)}">{"" if cell is None else escape(str(cell))}</td>'
        for column, cell in zip(columns, row, strict=True)
    )
    return f"<tr{attribute}>{''.join(cells)}</tr>"


def _class(column: Column) -> str:
    names = [name for name, has in (("number", column.number), ("head", column.heads)) if has]
    return f' class="{" ".join(names)}"' if names else ""


def _is_unsafe(char: str) -> bool:
    code = ord(char)
    is_control = (code < 0x20 and char not in _KEPT) or 0x7F <= code < 0xA0
    return is_control or 0xD800 <= code < 0xE000 or char in _BIDI or char in _BREAKS
