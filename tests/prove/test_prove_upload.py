"""``./run prove upload``: a real 500 MB adapter for SmolLM2-135M, by `tenora adapter push` and as a form: less than
20 MB more in the gateway, and it can be called."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.served import DEFAULT_MODEL, ROOT, Served, serving
from tests.tiny import peft_config
from tests.uploads import upload, watched

pytestmark = pytest.mark.long
LORA_RANK = 410  # all seven linears of 30 layers, fp32: 500.7 MB
SIZES = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (576, 192), "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (576, 1536), "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}  # fmt: skip
MAX_GROWTH_BYTES = 20_000_000


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    folder = tmp_path_factory.mktemp("large")
    draw = np.random.default_rng(0)
    tensors = {}
    for layer in range(30):
        for module, (num_in, num_out) in SIZES.items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = 0.01 * draw.standard_normal((LORA_RANK, num_in), np.float32)
            tensors[f"{key}.lora_B.weight"] = 0.01 * draw.standard_normal((num_out, LORA_RANK), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    one = {(0, module.split(".")[1]): (np.empty((LORA_RANK, 1)), None, 1.0) for module in SIZES}
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(one)))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    options = ("--no-demo", "--max-adapter-rank", "512", "--adapter-slots", "1", "--kv-memory", "200000000")
    with serving(tmp_path_factory.mktemp("home"), *options) as served:
        yield served


def push(served: Served, key: str, adapter: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "adapter", "push", str(adapter), "--name", "large"]
    environment = os.environ | {"TENORA_URL": served.url, "TENORA_API_KEY": key}
    done = subprocess.run([*command, "--base-model", DEFAULT_MODEL], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"sending large, 501 MB" in done.stderr


def post(served: Served, key: str, adapter: Path) -> None:
    with served.http(key) as http:
        answer = upload(http, "large", adapter, DEFAULT_MODEL)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("way", [push, post])
def test_half_a_gigabyte_adds_less_than_20_mb_to_the_gateway_and_can_be_called(served: Served, adapter, way, capsys):
    key = served.new_tenant(way.__name__, max_adapter_rank=512)
    with watched(served.gateways()) as peaks:
        began = time.monotonic()
        way(served, key, adapter)
        took_s = time.monotonic() - began
        with served.http(key) as http:
            answer = http.post("/completions", json={"model": "large", "prompt": "Hello", "max_tokens": 4})
    size = (adapter / "adapter_model.safetensors").stat().st_size
    with capsys.disabled():
        grown = f"the gateway's PSS grew {peaks.growth / 1e6:.1f} MB"
        print(f"\n{way.__name__}: {size / 1e6:.0f} MB in {took_s:.1f} s, {grown}")

    assert size > 500_000_000
    assert answer.status_code == 200, answer.text
    assert peaks.growth < MAX_GROWTH_BYTES
