"""Models and adapters of random numbers, made on the device: sizes of real ones without their files."""

from collections.abc import Iterable

import torch

from engine.models.config import SCALE, ModelConfig, from_hf, module_sizes
from engine.models.decoder import Decoder
from engine.weights import expected_shapes
from engine.weights.adapter import AdapterWeights, LoraPair
from kernels.quantised_linear import QuantisedWeight, dequantised

_COMMON = {"max_position_embeddings": 8192, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SHAPES = {
    "llama8b": {
        **_COMMON, "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "qwen06b": {
        **_COMMON, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "qwen30b": {
        **_COMMON, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "tiny": {
        **_COMMON, "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5,
    },
    "tiny_moe": {
        **_COMMON, "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "tiny_qwen": {
        **_COMMON, "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip


KINDS = {"int8": (torch.int8, False), "fp8": (torch.float8_e4m3fn, False), "block": (torch.float8_e4m3fn, True)}


def random_config(name: str) -> ModelConfig:
    return from_hf(SHAPES[name.partition("-")[0]])


def of_8_bits(name: str, weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a model NAME-int8, NAME-fp8 or NAME-block, those of its linears quantised, and the wide ones that
    they stand for; of another name both are what they were."""
    kind, is_blocked = KINDS.get(name.partition("-")[2], (None, False))
    stored, wide = dict(weights), dict(weights)
    for key, weight in weights.items() if kind is not None else ():
        if key.endswith("_proj.weight"):
            most = 127.0 if kind == torch.int8 else 448.0
            size_out, size_in = weight.shape
            tiles = weight.float().view(size_out // 128, 128, size_in // 128, 128).abs().amax((1, 3)) / most
            scales = tiles if is_blocked else weight.float().abs().amax(1) / most
            numbers = weight.float() / dequantised(QuantisedWeight(torch.ones_like(weight, dtype=torch.int8), scales))
            data = (numbers.round() if kind == torch.int8 else numbers).clamp(-most, most).to(kind)  # past 448 is NaN
            stored[key], stored[key + SCALE] = data, scales
            wide[key] = dequantised(QuantisedWeight(data, scales)).to(weight.dtype)
    return stored, wide


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Matrices keep the size of what they multiply, so that 32 layers neither fade nor explode."""
    draw = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, device=device, dtype=dtype)
            continue
        weight = torch.empty(shape, device=device, dtype=dtype).normal_(generator=draw)
        weights[name] = weight.mul_(1.0 if "embed" in name else shape[-1] ** -0.5)
    return weights


def random_decoder(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = random_config(name)
    return Decoder(config, of_8_bits(name, random_weights(config, device, dtype))[0])


def random_adapter(
    config: ModelConfig, lora_rank: int, seed: int, device: torch.device, modules: Iterable[str] = ()
) -> AdapterWeights:
    """All modules unless named; drawn on ``device``, kept in host memory. Different seeds, different content."""
    draw = torch.Generator(device).manual_seed(1000 + seed)
    sizes = module_sizes(config)
    pairs = {}
    for module in tuple(modules) or tuple(sizes):
        num_in, num_out = sizes[module]
        shapes = (config.num_layers, lora_rank, num_in), (config.num_layers, num_out, lora_rank)
        a, b = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=draw) for shape in shapes)
        a, b = (a * num_in**-0.5).cpu(), (b * 0.3 * lora_rank**-0.5).cpu()
        pairs |= {(layer, module): LoraPair(a[layer], b[layer], 1.0) for layer in range(config.num_layers)}
    return AdapterWeights(pairs, sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values()))
