"""Logs go to stderr: our own at the level that was asked for, of libraries only warnings."""

import logging
import sys

_OURS = ("gateway", "tenants", "engine")


def log_to_stderr(level: str) -> None:
    """Libraries at debug write what they carry: statements with their values, requests with their headers."""
    _leave_out_what_no_line_shows()
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        stream=sys.stderr,
        level=max(number, logging.WARNING),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for name in _OURS:
        logging.getLogger(name).setLevel(number)


def _leave_out_what_no_line_shows() -> None:
    """The logging package's own way to be quicker: a record isn't told its caller, thread, process and task."""
    logging._srcfile = None  # pyright: ignore[reportAttributeAccessIssue]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
