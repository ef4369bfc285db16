"""The default model with experts, served under its recipe's name, its router skewed so that some experts are hot."""

from collections.abc import Iterator

import pytest

from tests.served import Served, serving

RECIPE = "smollm2-135m-moe8"
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
