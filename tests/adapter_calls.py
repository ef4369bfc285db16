"""Adapters over HTTP: sent as a client sends them, and used so that equal outputs mean equal weights."""

import random
from pathlib import Path

import httpx

FILES = ("adapter_config.json", "adapter_model.safetensors")


def upload(http: httpx.Client, name: str, path: Path, **form: str) -> httpx.Response:
    """The two files of a PEFT folder."""
    files = {file: (path / file).read_bytes() for file in FILES}
    return http.post("/adapters", data={"name": name, "base_model": "tiny", **form}, files=files)


def generate(http: httpx.Client, model: str, prompt: list[int], num_tokens: int = 16, **change) -> tuple:
    """Greedy text, tokens and their log-probabilities: equal tuples mean equal output."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = http.post("/completions", json=body | {"logprobs": 1} | change)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    choice = answer.json()["choices"][0]
    return choice["text"], tuple(choice["logprobs"]["tokens"]), tuple(choice["logprobs"]["token_logprobs"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(3, 300) for _ in range(length)]
