"""A small client of our own two APIs: what the CLI and the demo need of them."""

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx

TIMEOUT_S = 60.0
COMMIT_TIMEOUT_S = 180.0  # the check of a large adapter, and the wait for it
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PIECE_BYTES = 1 << 20
SHOW_PROGRESS_BYTES = 8 << 20
Answer = dict[str, Any]


class ApiFailed(Exception):
    """The server refused (``status``), or there was no answer (0); the message is one line that says what to do."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


_KEY = re.compile(r"[!-~]+")


class Api:
    """One of our APIs, spoken to with one key. Reads no proxy settings: it is for servers of one's own.

    Raises ApiFailed for what can be no key: what it goes into must not end up in a message.
    """

    def __init__(self, base_url: str, key: str) -> None:
        if not _KEY.fullmatch(key):
            raise ApiFailed("the key is empty or has characters that no key has: give it whole, and nothing else")
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"}

    def call(self, method: str, path: str, **more: Any) -> Answer:
        """The answer's JSON object. Raises ApiFailed with the server's own words."""
        url = self._base_url + quote(path, safe="/%@")  # a name that was typed with `?` names nothing else
        options: dict[str, Any] = {"timeout": TIMEOUT_S} | more | {"headers": more.get("headers", {}) | self._headers}
        try:
            answer = httpx.request(method, url, trust_env=False, **options)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ApiFailed(f"{self._base_url} is no URL of a server: {error}") from error
        except httpx.TransportError as error:
            message = f"no answer from {self._base_url} ({error}): start `tenora serve`, or give its URL"
            raise ApiFailed(message) from error
        body = _object(answer)
        if answer.is_success:
            return body
        message = body.get("error", {}).get("message") or f"{url} answered {answer.status_code}"
        hint = " Is the key of this server?" if answer.status_code == 401 else ""
        raise ApiFailed(message + hint, answer.status_code)

    def text(self, path: str) -> str:
        """An answer that is a document. Raises ApiFailed with the server's own words."""
        url = self._base_url + path
        try:
            answer = httpx.get(url, headers=self._headers, timeout=TIMEOUT_S, trust_env=False)
        except httpx.TransportError as error:
            raise ApiFailed(f"{url} did not answer ({error})") from error
        if not answer.is_success:
            raise ApiFailed(_object(answer).get("error", {}).get("message", ""), answer.status_code)
        return answer.text

    def lines(self, path: str) -> Iterator[bytes]:
        """The lines of an answer as they come. Raises ApiFailed, also when it is cut off."""
        url = self._base_url + path
        try:
            with httpx.stream("GET", url, headers=self._headers, timeout=TIMEOUT_S, trust_env=False) as answer:
                if not answer.is_success:
                    answer.read()
                    raise ApiFailed(_object(answer).get("error", {}).get("message", ""), answer.status_code)
                yield from (line.encode() for line in answer.iter_lines())
        except httpx.TransportError as error:
            raise ApiFailed(f"{url} did not answer to the end ({error})") from error

    def every(self, path: str, params: dict[str, Any]) -> list[Any]:
        """The items of all pages of a list."""
        page = self.call("GET", path, params=params)
        items = page["data"]
        while page["next_page"]:
            page = self.call("GET", path, params=params | {"page": page["next_page"]})
            items += page["data"]
        return items


def _object(answer: httpx.Response) -> Answer:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ApiFailed(f"{answer.request.url} answered {answer.status_code} without a JSON object: is it Tenora's?")
    return body


def adapter_bytes(folder: Path) -> int:
    """What ``push_adapter`` would send. Raises OSError."""
    return sum((folder / file).stat().st_size for file in ADAPTER_FILES)


def push_adapter(
    api: Api,
    folder: Path,
    name: str,
    base_model: str,
    expected_version: int | None = None,
    sent: Callable[[int], object] = lambda num_bytes: None,
) -> Answer:
    """Uploads what PEFT's save_pretrained wrote, never whole in memory; ``sent`` hears of each piece's bytes.

    Raises ApiFailed, OSError."""
    path = f"/adapters/{quote(name, safe='')}"
    for file in ADAPTER_FILES:
        _put(api, f"{path}/files/{file}", folder / file, sent)
    body = {"base_model": base_model, "expected_version": expected_version}
    return api.call("POST", f"{path}/commit", json=body, timeout=COMMIT_TIMEOUT_S)


def _put(api: Api, path: str, file: Path, sent: Callable[[int], object]) -> None:
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        with file.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                sent(len(piece))
                yield piece

    length = {"content-length": str(file.stat().st_size)}
    if api.call("PUT", path, content=pieces(), headers=length)["sha256"] != digest.hexdigest():
        raise ApiFailed(f"{file.name} was changed on its way: push it again")


@contextlib.contextmanager
def progress(label: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr for what takes a while; called with each piece's bytes."""
    if num_bytes < SHOW_PROGRESS_BYTES:
        yield lambda sent: None
        return
    with click.progressbar(length=num_bytes, label=f"{label}, {num_bytes / 1e6:.0f} MB", file=sys.stderr) as bar:
        yield bar.update
