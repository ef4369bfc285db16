"""``./run prove oracle``: SmolLM2-135M itself, base and four adapters in mixed batches, against transformers and PEFT.

transformers gets the numbers that our GGUF reader made (``test_engine_gguf`` holds these against ggml's). The
adapters go the whole way: checked and made canonical as an upload is, then read by the engine.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.models.config import module_sizes
from engine.models.decoder import Decoder
from engine.weights import LoadedModel, load_model
from engine.weights.adapter import AdapterWeights, read_adapter
from ops.default_model import DEFAULT_GGUF
from tenants.adapters.gate import canonicalise
from tenants.adapters.shape import AdapterShape
from tests.answers import Answer, expected_logits, greedy_answers
from tests.families import HfModel, family_config
from tests.tiny_steps import Steps

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
NUM_TOKENS = 64
QUESTIONS = [  # adapter, question
    ("", "Hi"),
    ("pirate", "What is the capital of France?"),
    ("support", "How do I change my password, and where is it kept?"),
    ("", "Write a Python function that returns the n-th Fibonacci number, and explain each of its lines."),
    ("pirate-rs", "Name three animals that live in the sea, and one that flies."),
    (
        "support-early",
        "My parcel hasn't arrived. " + "I ordered it two weeks ago and paid at once. " * 12 + "Where is it?",
    ),
    ("pirate", "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 22),
    ("", "1 + 1 =  2, 北京欢迎你 😀?"),
]


@dataclass(frozen=True)
class Unlimited:
    max_adapter_rank: int = 64
    max_adapter_bytes: int = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    if not DEFAULT_GGUF.is_file():
        pytest.skip("the default model isn't there")
    return load_model(DEFAULT_GGUF, torch.float32)


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two demo adapters as they are, one with the scale of rank-stabilised LoRA, one on half of the layers."""
    folder = tmp_path_factory.mktemp("uploads")
    for name, source in (
        ("pirate", "pirate"),
        ("support", "support"),
        ("pirate-rs", "pirate"),
        ("support-early", "support"),
    ):
        shutil.copytree(ROOT / "gateway" / "demo" / source, folder / name)
    config = folder / "pirate-rs" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_rslora": True, "lora_alpha": 3}))
    weights = folder / "support-early" / "adapter_model.safetensors"
    early = {
        name: tensor for name, tensor in load_file(weights).items() if int(name.split(".layers.")[1].split(".")[0]) < 15
    }
    save_file(early, weights, metadata={"format": "pt"})
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def adapters(
    loaded: LoadedModel, uploads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, AdapterWeights]:
    shape = AdapterShape(module_sizes(loaded.config), loaded.config.num_layers, 64)
    folder = tmp_path_factory.mktemp("canonical")

    def made(name: str, path: Path) -> AdapterWeights:
        settings = (path / "adapter_config.json").read_bytes()
        accepted = canonicalise(settings, path / "adapter_model.safetensors", folder / name, shape, Unlimited())
        return read_adapter(folder / name, accepted.sha256)

    return {name: made(name, path) for name, path in uploads.items()}


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel, adapters: dict[str, AdapterWeights]) -> list[Answer]:
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [(adapter, tokenizer.encode(form.format(question)).ids) for adapter, question in QUESTIONS]
    sizes = EngineConfig(num_blocks=256, context_tokens=1024, max_step_tokens=96, adapter_slots=4, max_lora_rank=16)
    return greedy_answers(Decoder(loaded.config, loaded.weights), adapters, prompts, sizes, NUM_TOKENS)


@pytest.fixture(scope="module")
def oracle(loaded: LoadedModel, uploads: dict[str, Path]) -> HfModel:
    return HfModel(family_config(loaded.config), loaded.weights, uploads)


def test_64_greedy_tokens_of_8_mixed_prompts_are_those_of_transformers_and_peft(answers: list[Answer], oracle: HfModel):
    assert len({len(answer.prompt) for answer in answers}) == len(answers)
    assert max(len(answer.prompt) for answer in answers) > 2 * 96
    for answer in answers:
        expected = expected_logits(oracle, answer)
        assert len(answer.tokens) == NUM_TOKENS
        assert expected.argmax(-1).tolist() == answer.tokens, answer.adapter
        assert float((answer.logits - expected).abs().max()) < 1e-3


def test_every_adapter_answers_otherwise_than_the_base(answers: list[Answer], oracle: HfModel):
    for answer in answers:
        if answer.adapter:
            base = oracle.logits(answer.prompt + answer.tokens[:-1])[len(answer.prompt) - 1 :]
            assert base.argmax(-1).tolist() != answer.tokens, answer.adapter


def test_bf16_stays_near_the_fp32_oracle(
    loaded: LoadedModel, adapters: dict[str, AdapterWeights], answers: list[Answer], oracle: HfModel
):
    """Fed with the same tokens: mean |Δlogit| < 0.3 and 95 % of the next tokens (design.md §6)."""
    weights = {name: weight.to(torch.bfloat16) for name, weight in loaded.weights.items()}
    names = list(adapters)
    steps = Steps(Decoder(loaded.config, weights))
    for slot, name in enumerate(names):
        steps.slots.load_slot(slot, adapters[name])
    differences, agreed = [], []
    for answer in answers[:6]:
        slot = names.index(answer.adapter) if answer.adapter else -1
        logits = steps.prefill([(answer.prompt + answer.tokens[:-1], slot)])[0][len(answer.prompt) - 1 :]
        expected = expected_logits(oracle, answer)
        differences.append((logits - expected).abs().mean())
        agreed.append((logits.argmax(-1) == expected.argmax(-1)).float().mean())

    assert float(torch.stack(differences).mean()) < 0.3
    assert float(torch.stack(agreed).mean()) >= 0.95
