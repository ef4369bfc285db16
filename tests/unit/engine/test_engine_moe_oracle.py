"""Every family with experts, from a directory that transformers wrote, against transformers in fp32 on the CPU.

The engine answers eight prompts of other lengths and adapters in mixed batches; the oracle, adapters merged into its
weights, is then fed each answer in one piece. If its own next token equals ours at every position, its greedy answer is
ours, by induction.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.weights import LoadedModel, load_model
from engine.wire import Flow, SamplingParams, Submit, pack_ids, unpack_ids
from tests.tiny import Adapter, merged, tiny_adapter, tiny_tokenizer
from tests.tiny_steps import Steps, adapter_weights

NUM_TOKENS = 64
PROMPTS = [("", 1), ("a", 15), ("b", 16), ("", 17), ("c", 35), ("d", 43), ("a", 100), ("", 130)]  # adapter, length
TINY = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_experts_per_tok": 2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {"num_experts": 8, "moe_intermediate_size": 12, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 8, "intermediate_size": 12, "head_dim": 16}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "intermediate_size": 12, "sliding_window": 40}),
    "qwen2_moe": (
        "qwen2_moe", QWEN | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "num_experts_per_tok": 3},
    ),
    "qwen2_moe-every-second": (
        "qwen2_moe",
        QWEN | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "norm_topk_prob": True,
                "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "head_dim": 24, "mlp_only_layers": [0]}),
    "qwen3_moe-plain": ("qwen3_moe", QWEN | {"num_experts": 60, "num_experts_per_tok": 8}),
    "olmoe": ("olmoe", {"num_experts": 8, "intermediate_size": 12}),
    "olmoe-norm": (
        "olmoe", {"num_experts": 7, "intermediate_size": 12, "norm_topk_prob": True, "attention_bias": True},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In place of a state dict: norms around 1, biases that matter, and matrices that keep the scale of rows."""
    draw = torch.Generator().manual_seed(11)
    out = {}
    for name, weight in state.items():
        noise = torch.randn(weight.shape, generator=draw)
        if weight.dim() == 1:
            out[name] = 0.3 * noise + ("norm" in name)
        elif "embed_tokens" in name:
            out[name] = noise
        else:
            out[name] = noise * (3.0 if "lm_head" in name else 1.5) / weight.shape[-1] ** 0.5
    return out


class HfModel:
    """transformers' model of random weights, and what merging an adapter makes of it."""

    def __init__(self, name: str) -> None:
        import transformers  # takes seconds: only the tests that need it pay

        model_type, changes = CONFIGS[name]
        self.config = transformers.AutoConfig.for_model(model_type, **TINY | changes)
        self.config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        state = random_weights(self.model.state_dict())
        if self.config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.weights = state

    def save(self, folder: Path) -> Path:
        """As transformers writes it: one matrix an expert."""
        self.model.load_state_dict(self.weights)
        self.model.save_pretrained(folder)
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    def save_fused(self, folder: Path) -> Path:
        """As it is in transformers' memory: all experts of a layer in one tensor."""
        folder.mkdir()
        self.config.save_pretrained(folder)
        left_out = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        stored = {name: weight for name, weight in self.weights.items() if name not in left_out}
        save_file(stored, folder / "model.safetensors")
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    @torch.inference_mode()
    def logits(self, tokens: list[int], adapter: Adapter | None = None) -> Tensor:
        """Of all positions, [T, V]."""
        self.model.load_state_dict(merged(self.weights, adapter) if adapter else self.weights)
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@dataclass(frozen=True)
class Answer:
    adapter: str
    prompt: list[int]
    tokens: list[int]


def adapters_of(loaded: LoadedModel) -> dict[str, Adapter]:
    config = loaded.config
    return {
        "a": tiny_adapter(1, rank=4, modules=("q_proj", "k_proj", "v_proj", "o_proj"), config=config),
        "b": tiny_adapter(2, rank={"q_proj": 4, "v_proj": 8}, modules=("q_proj", "v_proj"), config=config),
        "c": tiny_adapter(3, rank=16, modules=("o_proj",), layers=(1, 2), config=config),
        "d": tiny_adapter(4, rank=2, modules=("q_proj", "k_proj"), layers=(3,), config=config),
    }


def answers(loaded: LoadedModel) -> list[Answer]:
    """Greedy answers to PROMPTS, all at once, the long prompts in several chunks."""
    sizes = EngineConfig(
        block_size=16, num_blocks=256, context_tokens=512, max_step_tokens=48, adapter_slots=4, max_lora_rank=16
    )
    engine = Engine(sizes, Runner(Decoder(loaded.config, loaded.weights), sizes))
    for key, adapter in adapters_of(loaded).items():
        engine.adapter_ready(key, adapter_weights(adapter))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = {f"r{i}": random.Random(i).choices(range(3, 300), k=length) for i, (_, length) in enumerate(PROMPTS)}
    for (name, prompt), (adapter, _) in zip(prompts.items(), PROMPTS, strict=True):
        space = b"n" + adapter.encode()
        engine.add(Submit(name, [pack_ids(prompt)], sampling, Flow("f"), space, NUM_TOKENS, adapter_key=adapter))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    most = 0
    while engine.has_work:
        result = engine.step()
        most = max(most, result.stats.num_sequences)
        for delta in result.deltas:
            tokens[delta.request_id] += unpack_ids(delta.token_ids)
    assert most == len(PROMPTS)
    return [Answer(a, prompts[name], tokens[name]) for name, (a, _) in zip(prompts, PROMPTS, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_64_greedy_tokens_of_8_mixed_prompts_are_those_of_transformers(name: str, tmp_path: Path):
    oracle = HfModel(name)
    loaded = load_model(oracle.save(tmp_path / "m"), torch.float32)
    adapters = adapters_of(loaded)
    decoder = Decoder(loaded.config, loaded.weights)

    given = answers(loaded)

    for answer in given:
        fed, adapter = answer.prompt + answer.tokens[:-1], adapters.get(answer.adapter)
        expected = oracle.logits(fed, adapter)
        assert len(answer.tokens) == NUM_TOKENS
        assert expected[len(answer.prompt) - 1 :].argmax(-1).tolist() == answer.tokens, answer.adapter
        (ours,) = Steps(decoder, [adapter] if adapter else []).prefill([(fed, 0 if adapter else -1)])
        assert float((ours - expected).abs().max()) < 1e-3
    assert len({tuple(answer.tokens[-8:]) for answer in given}) == len(given)  # no fixed point of a random model


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_fused_and_classic_checkpoints_are_the_same_model(name: str, tmp_path: Path):
    oracle = HfModel(name)

    classic = load_model(oracle.save(tmp_path / "classic"), torch.float32)
    fused = load_model(oracle.save_fused(tmp_path / "fused"), torch.float32)

    assert classic.config == fused.config
    assert classic.weights.keys() == fused.weights.keys()
    assert all(torch.equal(classic.weights[key], fused.weights[key]) for key in fused.weights)
    assert any(".experts.0." in key for key in _names(tmp_path / "classic"))
    assert not any(".experts.0." in key for key in _names(tmp_path / "fused"))


def _names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())
