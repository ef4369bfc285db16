"""GGUF files of every tensor type and architecture: the numbers, the names and the logits of the same model elsewhere.

The files are written by the ``gguf`` package, ggml's own; the numbers are checked against it and against scalar
decoders.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.models.config import AttentionConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.weights import LoadedModel, UnsupportedModel, load_model
from engine.weights.gguf import GgufFile
from engine.weights.gguf_types import TENSOR_TYPES
from tests.families import DENSE, family_config, family_weights
from tests.ggml_scalar import TYPES, decode, random_rows
from tests.tiny import tiny_tokenizer
from tests.tiny_steps import Steps

TOKENS = tiny_tokenizer(300)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_types_are_those_that_are_promised():
    assert {kind.name for kind in TENSOR_TYPES.values()} == set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_decodes_to_the_numbers_of_ggml_to_the_bit(kind: str, tmp_path: Path):
    rows = random_rows(kind, 12, 512, np.random.default_rng(len(kind)))
    number = gguf.GGMLQuantizationType(TYPES[kind][0])
    path = write(tmp_path / "t.gguf", "llama", {}, {"t": (kind, rows)})

    read = GgufFile(path).read("t")

    assert read.shape == (12, 512)
    assert np.array_equal(read, decode(kind, rows))
    assert np.array_equal(read, gguf.dequantize(rows, number).reshape(12, 512))
    assert np.isfinite(read).all()
    assert float(read.std()) > 0.05


# ── whole models ─────────────────────────────────────────────────────────────────────────────────


def write(path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """tensors: name → (type, uint8 rows)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, (kind, rows) in tensors.items():
        if kind == "F32":
            values = rows.view("<f4")
            writer.add_tensor(name, values[0] if len(values) == 1 else values)
        else:
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType(TYPES[kind][0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES = {"llama": "smollm2", "qwen2": "qwen2", "qwen3": "qwen3"}  # → the family's tiny model
TYPE_OF = {
    "embed_tokens": "Q6_K", "lm_head": "BF16", "q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "Q5_1", "o_proj": "Q5_0",
    "gate_proj": "Q4_0", "up_proj": "Q4_1", "down_proj": "Q8_0",
}  # fmt: skip
NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}  # fmt: skip


def large(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The tiny model in sizes of whole blocks of 256."""
    return replace(config, hidden_size=256, intermediate_size=256, num_layers=1, **changes)


def metadata_of(config: ModelConfig, architecture: str) -> dict[str, Any]:
    attention = config.attention
    fields = {
        "block_count": config.num_layers,
        "context_length": config.context_tokens,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
    }
    vocab = json.loads(TOKENS.to_str())["model"]
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].get)
    return {f"{architecture}.{name}": value for name, value in fields.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocab["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def gguf_name(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    return f"{prefix}{NAMES[parts[-2]]}.{parts[-1]}"


def stored(rows: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """What llama.cpp's converter does to q and k of its architecture "llama" (LlamaModel.permute)."""
    module = name.split(".")[-2]
    heads = {"q_proj": config.attention.num_heads, "k_proj": config.attention.num_kv_heads}.get(module)
    if heads is None or config.family != "llama":
        return rows
    vector = rows.view("<f4").reshape(-1, 1).view(np.uint8) if len(rows) == 1 else rows  # a bias
    turned = vector.reshape(heads, 2, len(vector) // heads // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(rows.shape)


def both_forms(
    folder: Path, config: ModelConfig, architecture: str, kind: str | None = None
) -> tuple[LoadedModel, LoadedModel]:
    """The same numbers as a GGUF file and as a directory; weights of ``kind``, or of all kinds."""
    draw = np.random.default_rng(5)
    weights, tensors = {}, {}
    for name, like in family_weights(config).items():
        if like.ndim == 1:
            rows = like.numpy()[None].view(np.uint8)
            weights[name], chosen = like, "F32"
        else:
            chosen = kind or TYPE_OF[name.split(".")[-2]]
            rows = random_rows(chosen, *like.shape, draw)
            weights[name] = torch.from_numpy(decode(chosen, rows))
        tensors[gguf_name(name)] = (chosen, stored(rows, name, config))
    file = write(folder / "m.gguf", architecture, metadata_of(config, architecture), tensors)
    directory = folder / "hf"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(family_config(config)))
    save_file(weights, directory / "model.safetensors")
    TOKENS.save(str(directory / "tokenizer.json"))
    return load_model(file, torch.float32), load_model(directory, torch.float32)


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    prompt = [5 + 7 * i % 290 for i in range(70)]
    return Steps(Decoder(loaded.config, loaded.weights)).prefill([(prompt, -1)])[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_gguf_file_of_all_types_and_a_directory_of_the_same_numbers_give_equal_logits(
    architecture: str, tied: bool, tmp_path: Path
):
    config = large(DENSE[ARCHITECTURES[architecture]], tie_word_embeddings=tied)

    file, directory = both_forms(tmp_path, config, architecture)

    assert file.config == directory.config == config
    assert file.weights.keys() == directory.weights.keys()
    logits = logits_of(file)
    assert torch.equal(logits, logits_of(directory))
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0.1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_files_that_are_not_quantized_give_equal_logits_too(kind: str, tmp_path: Path):
    file, directory = both_forms(tmp_path, DENSE["qwen2"], "qwen2", kind)

    assert torch.equal(logits_of(file), logits_of(directory))


def test_biases_of_the_llama_architecture_are_put_back_in_order_with_their_weights(tmp_path: Path):
    file, directory = both_forms(tmp_path, DENSE["llama-biases"], "llama", "F32")

    assert file.config.attention == directory.config.attention == AttentionConfig(4, 4, 12, bias=True, output_bias=True)
    assert torch.equal(logits_of(file), logits_of(directory))


def llama_3_divisors(config: ModelConfig) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    scaling, dim = config.rope.scaling, config.attention.head_dim
    low, high = (
        scaling.original_context_tokens / factor for factor in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    divisors = []
    for exponent in range(0, dim, 2):
        wavelength = 2 * np.pi * config.rope.theta ** (exponent / dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling.factor)
        else:
            smooth = scaling.original_context_tokens / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array([divisors], np.float32)


def test_llama_3s_stretched_rope_comes_as_a_tensor_in_gguf_files(tmp_path: Path):
    config = DENSE["llama3"]
    _, directory = both_forms(tmp_path, config, "llama", "F32")
    tensors = {gguf_name(name): ("F32", stored(np.atleast_2d(w.numpy()).view(np.uint8), name, config))
               for name, w in directory.weights.items()}  # fmt: skip
    divisors = llama_3_divisors(config)
    with_them = tensors | {"rope_freqs.weight": ("F32", divisors.view(np.uint8))}
    file, plain = (
        load_model(write(tmp_path / f"{i}.gguf", "llama", metadata_of(config, "llama"), chosen), torch.float32)
        for i, chosen in enumerate((with_them, tensors))
    )

    assert len(set(divisors[0].tolist())) > 3  # some whole, some none, some between
    expected = logits_of(directory)
    # the frequencies differ by their rounding (2e-7 of each), which these random weights make 1e-3 of a logit of 14
    assert float((logits_of(file) - expected).abs().max()) < 1e-2
    assert float((logits_of(plain) - expected).abs().max()) > 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llama.attention.sliding_window": 32}, "sliding_window"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.rope.dimension_count": 32}, "dimension_count"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads"),
    ],
)
def test_what_a_file_asks_for_and_is_not_computed_is_refused_by_name(change: dict, named: str, tmp_path: Path):
    config = DENSE["llama3"]
    tensors = {"token_embd.weight": ("F32", np.zeros((300, 48), np.float32).view(np.uint8))}
    path = write(tmp_path / "m.gguf", "llama", metadata_of(config, "llama") | change, tensors)

    with pytest.raises(UnsupportedModel, match=named):
        load_model(path, torch.float32)
