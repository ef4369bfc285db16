"""A small client of our own two APIs: what the CLI and the demo need of them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 60.0
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
        url = self._base_url + path
        try:
            answer = httpx.request(method, url, headers=self._headers, timeout=TIMEOUT_S, trust_env=False, **more)
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


def _object(answer: httpx.Response) -> Answer:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ApiFailed(f"{answer.request.url} answered {answer.status_code} without a JSON object: is it Tenora's?")
    return body


def adapter_files(folder: Path) -> dict[str, Any]:
    """The two files of a PEFT adapter as an upload's parts. Raises OSError."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {name: (name, (folder / name).read_bytes()) for name in names}
