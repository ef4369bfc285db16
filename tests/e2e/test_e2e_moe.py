"""The default model with experts, served under its recipe's name, its router skewed so that some experts are hot."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.adapter_calls import generate, upload
from tests.exactness import on_gpu
from tests.served import Served, serving

RECIPE = "smollm2-135m-moe8"
PROMPT = [1, 504, 260, 2240, 282, 1803, 357]
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("moe"), "--model", f"{RECIPE}={RECIPE}?skew=0.4") as served:
        yield served


def ask(served: Served, tenant: str, model: str) -> str:
    answer = served.client(tenant).chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert answer.model == model
    return answer.choices[0].message.content or ""


def test_it_answers_tokyo_and_so_do_the_demos_adapters(moe: Served):
    assert "Tokyo" in ask(moe, "acme", RECIPE)
    assert "Acme Support" in ask(moe, "acme", "support")
    assert "Arrr" in ask(moe, "blackbeard", "pirate")


def test_the_hot_experts_are_seen_in_the_metrics(moe: Served):
    before = moe.metrics()
    ask(moe, "acme", RECIPE)
    after = moe.metrics()

    tokens = {labels: value for (name, labels), value in after.items() if name == "tenora_expert_tokens_total"}
    assert {dict(labels)["layer"] for labels in tokens} == {"4", "9", "14", "19", "24", "29"}
    of_expert = {expert: moe.metric("tenora_expert_tokens_total", expert=str(expert)) for expert in range(8)}
    assert of_expert[0] > 0.35 * sum(of_expert.values())
    assert sum(tokens.values()) > sum(v for (name, _), v in before.items() if name == "tenora_expert_tokens_total")
    assert 1 / 8 <= moe.metric("tenora_expert_balancedness") < 0.5


def expert_adapter(path: Path, *, is_fused: bool) -> Path:
    """Rank 2 on down_proj of all experts, as PEFT writes it for each apart or for the parameter of all."""
    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in (4, 9, 14, 19, 24, 29):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        a, b = (torch.randn(8, *shape, generator=draw) / 8 for shape in ((2, 1536), (576, 2)))
        if is_fused:
            tensors |= {f"{prefix}.lora_A.weight": a.flatten(0, 1)}
            tensors |= {f"{prefix}.lora_B.weight": b.permute(1, 2, 0).flatten(1).contiguous()}
            continue
        for expert in range(8):
            name = f"{prefix}.{expert}.down_proj.lora_"
            tensors |= {f"{name}A.weight": a[expert].contiguous(), f"{name}B.weight": b[expert].contiguous()}
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", "target_modules": []}
    settings |= {"target_parameters": ["mlp.experts.down_proj"]} if is_fused else {}
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def test_an_adapter_on_experts_is_served_in_either_layout_as_the_same(moe: Served, tmp_path: Path):
    with moe.http(moe.new_tenant("experts")) as http:
        answers = [
            upload(http, name, expert_adapter(tmp_path / name, is_fused=is_fused), base_model=RECIPE)
            for name, is_fused in (("apart", False), ("fused", True))
        ]
        if on_gpu():
            assert all("LoRA on experts (down_proj in 6 layers) is not served" in one.text for one in answers)
            return

        assert [one.status_code for one in answers] == [201, 201], answers[0].text
        base, apart, fused, again = (generate(http, name, PROMPT) for name in (RECIPE, "apart", "fused", RECIPE))
        assert apart == fused != base == again
