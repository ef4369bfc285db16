"""The tiny random model of the tests: small enough for thousands of steps, shaped so that no two sizes tie.

Vocabulary 300, hidden 32, 2 layers, 4 heads / 2 KV heads of 8, MLP 64. Nothing is downloaded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.models.config import MODULES, AttentionConfig, ModelConfig, RopeConfig, module_sizes

Adapter = dict[tuple[int, str], tuple[Tensor, Tensor, float]]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (bos), 2 (eos)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PARENT = {name: "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn" for name in MODULES}


def tiny_config(
    *,
    context_tokens: int = 512,
    tie_word_embeddings: bool = False,
    attention_bias: bool = False,
    sliding_window: int | None = None,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        vocab_size=300,
        context_tokens=context_tokens,
        attention=AttentionConfig(4, 2, 8, attention_bias, sliding_window),
        rope=RopeConfig(theta=10_000.0),
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def weight_name(layer: int, module: str) -> str:
    """Hugging Face's name of one adaptable linear."""
    return f"model.layers.{layer}.{_PARENT[module]}.{module}.weight"


def tiny_weights(seed: int = 0, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None) -> dict:
    """Random weights under Hugging Face's names; greedy output wanders instead of repeating the last token."""
    config = config or tiny_config()
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=draw) * std).to(dtype)

    hidden = config.hidden_size
    weights = {"model.embed_tokens.weight": normal(config.vocab_size, hidden, std=1.0)}
    for layer in range(config.num_layers):
        for module, (num_in, num_out) in module_sizes(config).items():
            weights[weight_name(layer, module)] = normal(num_out, num_in, std=1.5 / num_in**0.5)
            if config.attention.bias and _PARENT[module] == "self_attn":
                weights[weight_name(layer, module).replace(".weight", ".bias")] = normal(num_out, std=0.3)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = (1 + normal(hidden, std=0.1)).to(dtype)
    weights["model.norm.weight"] = (1 + normal(hidden, std=0.1)).to(dtype)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = normal(config.vocab_size, hidden, std=3.0 / hidden**0.5)
    return weights


def tiny_adapter(
    seed: int,
    rank: int | Mapping[str, int] = 4,
    modules: Sequence[str] = MODULES,
    layers: Iterable[int] = (0, 1),
    config: ModelConfig | None = None,
) -> Adapter:
    """Random LoRA pairs, (layer, module) → (A [r, in], B [out, r], scale); large enough to change greedy output.

    ``rank`` may differ by module: ``{"q_proj": 4, "v_proj": 8}``.
    """
    sizes = module_sizes(config or tiny_config())
    draw = torch.Generator().manual_seed(10_000 + seed)
    adapter: Adapter = {}
    for layer in layers:
        for module in modules:
            lora_rank = rank if isinstance(rank, int) else rank[module]
            num_in, num_out = sizes[module]
            a = torch.randn(lora_rank, num_in, generator=draw) / num_in**0.5
            b = torch.randn(num_out, lora_rank, generator=draw) / lora_rank**0.5
            adapter[layer, module] = (a, b, 2.0)
    return adapter


def merged(weights: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """The weights with W + scale · B · A in place of W: the reference of every LoRA test."""
    out = dict(weights)
    for (layer, module), (a, b, scale) in adapter.items():
        name = weight_name(layer, module)
        out[name] = (out[name].double() + scale * b.double() @ a.double()).to(weights[name].dtype)
    return out


def write_hf_dir(
    path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns ``path``."""
    config = config or tiny_config()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(config, dtype), indent=2))
    save_file(tiny_weights(seed, dtype, config), path / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(config.vocab_size).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": SPECIAL_TOKENS[1],
                "eos_token": SPECIAL_TOKENS[2],
                "unk_token": SPECIAL_TOKENS[0],
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return path


def hf_config(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict:
    """``config`` in the spelling of ``config.json`` (transformers 4)."""
    attention = config.attention
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "sliding_window": attention.sliding_window,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def tiny_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """Byte-level BPE in which each id below ``vocab_size`` decodes: 3 specials, 256 bytes, then merges."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(left, right) for left in "Ġetaoins" for right in "thaeioru"]
    merges = pairs[: vocab_size - len(tokens)]
    tokens += [left + right for left, right in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_peft_dir(
    path: Path,
    adapter: Adapter,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "base_model.model.",
    extra_config: Mapping[str, object] | None = None,
) -> Path:
    """Writes adapter_config.json and adapter_model.safetensors as PEFT does; returns ``path``.

    All pairs of one module must share rank and scale; modules that differ from the first go to rank_pattern
    and alpha_pattern. ``extra_config`` overrides keys of the configuration.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for (layer, module), (a, b, _) in adapter.items():
        key = prefix + weight_name(layer, module).removesuffix(".weight")
        tensors[f"{key}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"{key}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {**peft_config(adapter), **(extra_config or {})}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return path


def peft_config(adapter: Adapter) -> dict:
    """The adapter_config.json that gives ``adapter`` its ranks and scales."""
    ranks = {module: a.shape[0] for (_, module), (a, _, _) in adapter.items()}
    alphas = {module: scale * a.shape[0] for (_, module), (a, _, scale) in adapter.items()}
    first = next(iter(ranks))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "target_modules": list(ranks),
        "rank_pattern": {module: r for module, r in ranks.items() if r != ranks[first]},
        "alpha_pattern": {module: x for module, x in alphas.items() if x != alphas[first]},
    }
