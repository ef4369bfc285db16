"""Traffic that moves all that is counted: good, cached, refused, adapter, expert, structured and too many requests."""

import concurrent.futures
from pathlib import Path

from tests.served import Served
from tests.tiny import tiny_adapter, write_peft_dir

# a pool so small that eight requests preempt each other
OPTIONS = ("--dtype", "float32", "--block-size", "4", "--kv-blocks", "64", "--context", "128")
OPTIONS += ("--adapter-slots", "2", "--demo")


def models(model_dir: Path) -> tuple[str, ...]:
    """The tiny model, dense and with experts."""
    return ("--model", f"tiny={model_dir}", "--model", f"moe=upcycle:{model_dir}?experts=4&every=1")


def load(served: Served, key: str, tmp_path: Path) -> None:
    """Good, cached, refused, adapter and too many requests."""
    path = write_peft_dir(tmp_path, tiny_adapter(1))
    files = {name: (path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}

    def call(i: int) -> int:
        body = {
            "model": ("tiny", "A", "moe")[i % 3], "prompt": [5 + i % 3] * 30, "max_tokens": 80, "ignore_eos": True,
            "stream": i % 2 == 0, "service_tier": ("priority", "default", "flex")[i % 3],
        }  # fmt: skip
        with served.http(key) as http:
            return http.post("/completions", json=body).status_code

    with served.http(key) as http, concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert http.post("/adapters", data={"name": "A", "base_model": "tiny"}, files=files).status_code == 201
        assert set(pool.map(call, range(24))) == {200}
        assert http.post("/completions", json={"model": "tiny", "prompt": "x", "max_tokens": -1}).status_code == 400
        shaped = {"model": "tiny", "prompt": "x", "max_tokens": 8, "response_format": {"type": "json_object"}}
        assert http.post("/completions", json=shaped).status_code == 200
    with served.http(served.new_tenant("poor", requests_per_minute=1)) as http:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert {http.post("/completions", json=body).status_code for _ in range(3)} == {200, 429}
