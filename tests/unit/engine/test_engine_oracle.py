"""Every dense family through the real engine against transformers and PEFT (fp32, eager attention, on the CPU).

The engine answers eight prompts of other lengths and adapters in mixed batches; the oracle is then fed each answer
in one piece. If its own next token equals ours at every position, its greedy answer is ours, by induction.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig, from_hf
from engine.models.decoder import Decoder
from tests.answers import Answer, expected_logits, greedy_answers
from tests.families import DENSE, WINDOW, HfModel, family_adapters, family_config, family_weights, peft_dirs
from tests.tiny_steps import adapter_weights

NUM_TOKENS = 64
CHUNK = 48  # tokens of a step: the long prompts come in several
BLOCK = 16
# (adapter, prompt length): one token, around a block's border, across the window while decoding and while
# prefilling, across a tile of 128 keys, and more than two chunks
PROMPTS = [
    ("", 1), ("a", BLOCK - 1), ("b", BLOCK), ("", BLOCK + 1),
    ("c", WINDOW - 5), ("d", WINDOW + 3), ("a", 100), ("", 130),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int, vocab_size: int) -> list[int]:
    return random.Random(length).choices(range(3, vocab_size), k=length)


def answers(config: ModelConfig, dtype: torch.dtype) -> list[Answer]:
    """Greedy answers of the engine to PROMPTS, all at once."""
    sizes = EngineConfig(
        block_size=BLOCK, num_blocks=256, context_tokens=512, max_step_tokens=CHUNK, adapter_slots=4, max_lora_rank=16
    )
    adapters = {key: adapter_weights(adapter) for key, adapter in family_adapters(config).items()}
    prompts = [(adapter, prompt_of(length, config.vocab_size)) for adapter, length in PROMPTS]
    return greedy_answers(Decoder(config, family_weights(config, dtype=dtype)), adapters, prompts, sizes, NUM_TOKENS)


def oracle_of(config: ModelConfig, folder: Path, spelling: int = 4) -> HfModel:
    paths = peft_dirs(folder, family_adapters(config))
    return HfModel(family_config(config, spelling=spelling), family_weights(config), paths)


@pytest.mark.parametrize("name", DENSE)
def test_64_greedy_tokens_of_8_mixed_prompts_are_those_of_transformers_and_peft(name: str, tmp_path: Path):
    config = DENSE[name]
    oracle = oracle_of(config, tmp_path)

    given = answers(config, torch.float32)

    for answer in given:
        expected = expected_logits(oracle, answer)
        assert len(answer.tokens) == NUM_TOKENS
        assert expected.argmax(-1).tolist() == answer.tokens, answer.adapter
        assert float((answer.logits - expected).abs().max()) < 1e-3
    assert len({tuple(answer.tokens[-8:]) for answer in given}) == len(given)  # no fixed point of a random model


@pytest.mark.parametrize("name", DENSE)
def test_bf16_stays_near_the_fp32_oracle(name: str, tmp_path: Path):
    """design.md §6: mean |Δlogit| < 0.3 and 95 % of the next tokens, fed with the same tokens."""
    config = DENSE[name]
    oracle = oracle_of(config, tmp_path)

    given = answers(config, torch.bfloat16)

    expected = torch.cat([expected_logits(oracle, answer) for answer in given])
    logits = torch.cat([answer.logits for answer in given])
    assert float((logits - expected).abs().mean()) < 0.3
    assert float((logits.argmax(-1) == expected.argmax(-1)).float().mean()) >= 0.95


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("qwen2-window", {"use_sliding_window": False}),
        ("llama3", {"rope_scaling": None}),
        ("qwen3", {"rms_norm_eps": 0.5}),
    ],
)
def test_the_oracle_would_see_a_mistake(name: str, change: dict, tmp_path: Path):
    """One position more in the window is seen, too: what these models are for."""
    config = DENSE[name]
    given = [answer for answer in answers(config, torch.float32) if not answer.adapter]

    wrong = HfModel(family_config(config) | change, family_weights(config), {})

    differences = [float((answer.logits - expected_logits(wrong, answer)).abs().max()) for answer in given]
    assert max(differences) > 0.1


def test_every_adapter_changes_the_answers(tmp_path: Path):
    config = DENSE["qwen3"]
    oracle, tokens = oracle_of(config, tmp_path), prompt_of(50, 300)

    logits = [oracle.logits(tokens, adapter) for adapter in ("", "a", "b", "c", "d")]

    assert all(float((logits[0] - other).abs().max()) > 0.5 for other in logits[1:])


@pytest.mark.parametrize("spelling", [4, 5])
@pytest.mark.parametrize("name", DENSE)
def test_both_spellings_of_a_config_mean_the_same_to_us_and_to_transformers(name: str, spelling: int, tmp_path: Path):
    config, tokens = DENSE[name], prompt_of(90, 300)

    assert from_hf(family_config(config, spelling=spelling)) == config
    first, second = (HfModel(family_config(config, spelling=s), family_weights(config), {}) for s in (4, spelling))
    assert torch.equal(first.logits(tokens), second.logits(tokens))
