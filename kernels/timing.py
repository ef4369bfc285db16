"""How long ops take, for who wants to know: when nobody does, a call costs one look at a context variable."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

Watch = Callable[[str], AbstractContextManager[None]]
P = ParamSpec("P")
R = TypeVar("R")

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Each outermost op that this thread calls meanwhile runs within ``watch(its name)``."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def timed(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function an op of that name: what it calls is part of it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            watch = _watch.get()
            if watch is None:
                return function(*args, **kwargs)
            token = _watch.set(None)
            try:
                with watch(op):
                    return function(*args, **kwargs)
            finally:
                _watch.reset(token)

        return call

    return decorate
