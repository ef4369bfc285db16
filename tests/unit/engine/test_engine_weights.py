"""GGUF files and Hugging Face directories → the same config, names and numbers."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.weights import UnsupportedModel, load_model
from engine.weights.gguf import GgufFile
from engine.weights.gguf_model import unpermute
from ops.default_model import DEFAULT_GGUF

needs_default_gguf = pytest.mark.skipif(not DEFAULT_GGUF.is_file(), reason="the default model isn't there")

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 32, 64, 2, 4, 2, 40
STRING, ARRAY, U32, F32, BOOL = 8, 9, 4, 6, 7


# ── a small GGUF writer ──────────────────────────────────────────────────────────────────────────


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def metadata_value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(text(each) for each in value)
        case _:
            return struct.pack("<IIQ", ARRAY, U32, len(value)) + struct.pack(f"<{len(value)}I", *value)


def encode_f32(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def encode_f16(values: np.ndarray) -> bytes:
    return values.astype("<f2").tobytes()


def encode_q8_0(values: np.ndarray) -> bytes:
    blocks = []
    for block in values.reshape(-1, 32):
        scale = np.float16(np.abs(block).max() / 127)
        quants = np.round(block / np.float32(scale)).astype(np.int8) if scale else np.zeros(32, np.int8)
        blocks.append(scale.tobytes() + quants.tobytes())
    return b"".join(blocks)


def encode_q4_1(values: np.ndarray) -> bytes:
    blocks = []
    for block in values.reshape(-1, 32):
        low = np.float16(block.min())
        scale = np.float16((block.max() - block.min()) / 15)
        quants = np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
        blocks.append(scale.tobytes() + low.tobytes() + (quants[:16] | quants[16:] << 4).tobytes())
    return b"".join(blocks)


ENCODERS = {"F32": (0, encode_f32), "F16": (1, encode_f16), "Q4_1": (3, encode_q4_1), "Q8_0": (8, encode_q8_0)}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + metadata_value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, values) in tensors.items():
        number, encode = ENCODERS[kind]
        shape = values.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, len(data))
        data += encode(values)
        data += bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


# ── a small model in both forms ──────────────────────────────────────────────────────────────────

SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
GGUF_NAMES = dict(
    zip(SIZES, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
)
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [f"<{index}>" for index in range(VOCAB)],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    weights["model.norm.weight"] = torch.randn(HIDDEN, generator=generator)
    for layer in range(LAYERS):
        for module, size in SIZES.items():
            weights[f"model.layers.{layer}.{module}.weight"] = torch.randn(size, generator=generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.randn(HIDDEN, generator=generator)
    return weights


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(weights: dict[str, torch.Tensor], kind: str = "F32") -> dict[str, tuple[str, np.ndarray]]:
    tensors = {
        "token_embd.weight": (kind, weights["model.embed_tokens.weight"].numpy()),
        "output_norm.weight": ("F32", weights["model.norm.weight"].numpy()),
    }
    for layer in range(LAYERS):
        for module, name in GGUF_NAMES.items():
            values = weights[f"model.layers.{layer}.{module}.weight"].numpy()
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            tensors[f"blk.{layer}.{name}.weight"] = (kind, permute(values, heads) if heads else values)
        for name, norm in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            tensors[f"blk.{layer}.{name}.weight"] = ("F32", weights[f"model.layers.{layer}.{norm}.weight"].numpy())
    return tensors


def hf_directory(path: Path, weights: dict[str, torch.Tensor], config: dict[str, Any] = HF_CONFIG) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[])).save(str(path / "tokenizer.json"))
    return path


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_gguf_file_and_a_directory_of_the_same_model_load_alike(tmp_path: Path):
    weights = hf_weights()
    from_gguf = load_model(write_gguf(tmp_path / "m.gguf", METADATA, gguf_tensors(weights)), torch.float32)
    from_directory = load_model(hf_directory(tmp_path / "m", weights), torch.float32)

    assert from_gguf.config == from_directory.config
    assert from_gguf.weights.keys() == from_directory.weights.keys() == weights.keys()
    assert all(torch.equal(from_gguf.weights[name], weights[name]) for name in weights)
    assert all(torch.equal(from_directory.weights[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 0.0), ("F16", 2e-3), ("Q8_0", 0.02), ("Q4_1", 0.25)])
def test_every_tensor_type_gives_back_the_numbers_within_its_step(tmp_path: Path, kind: str, tolerance: float):
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    read = GgufFile(write_gguf(tmp_path / "m.gguf", {}, {"t": (kind, values)})).read("t")

    assert read.shape == values.shape
    assert read.dtype == np.float32
    assert float(np.abs(read - values).max()) <= tolerance


def test_a_q4_1_block_is_scale_times_nibble_plus_minimum_with_the_low_nibbles_first(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": ("Q4_1", np.arange(32, dtype=np.float32))})
    block = np.float16(0.5).tobytes() + np.float16(-1).tobytes() + bytes(range(0x10, 0x20))
    path.write_bytes(path.read_bytes()[:-32] + block + bytes(12))

    read = GgufFile(path).read("t")

    assert read.tolist() == [0.5 * low - 1 for low in range(16)] + [0.5 * 1 - 1] * 16


def test_a_tensor_of_many_blocks_is_decoded_over_its_whole_length(tmp_path: Path):
    values = np.arange(3 * 8192 * 32 + 32, dtype=np.float32)  # more than is decoded at once
    read = GgufFile(write_gguf(tmp_path / "m.gguf", {}, {"t": ("Q8_0", values)})).read("t")

    assert float(np.abs(read - values).max() / values.max()) < 0.01


def test_unpermuting_undoes_the_converters_order():
    weight = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)

    assert np.array_equal(unpermute(permute(weight, 3), 3), weight)
    assert not np.array_equal(permute(weight, 3), weight)


def test_an_untied_head_is_read_from_output_weight(tmp_path: Path):
    tensors = gguf_tensors(hf_weights())
    head = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    loaded = load_model(
        write_gguf(tmp_path / "m.gguf", METADATA, tensors | {"output.weight": ("F32", head)}), torch.float32
    )

    assert loaded.config.tie_word_embeddings is False
    assert np.array_equal(loaded.weights["lm_head.weight"].numpy(), head)


def test_weights_are_cast_and_the_revision_depends_on_content_only(tmp_path: Path):
    tensors = gguf_tensors(hf_weights())
    first = load_model(write_gguf(tmp_path / "a.gguf", METADATA, tensors), torch.float32)
    renamed = load_model(write_gguf(tmp_path / "b.gguf", METADATA, tensors), torch.bfloat16)
    other = load_model(write_gguf(tmp_path / "c.gguf", METADATA, gguf_tensors(hf_weights(1))), torch.float32)

    assert {tensor.dtype for tensor in renamed.weights.values()} == {torch.bfloat16}
    assert first.revision == renamed.revision != other.revision
    assert len(first.revision) == 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "qwen35"}, "qwen35"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_what_a_gguf_file_asks_for_and_is_not_served_is_refused_by_name(tmp_path: Path, change: dict, named: str):
    path = write_gguf(tmp_path / "m.gguf", METADATA | change, gguf_tensors(hf_weights()))

    with pytest.raises(UnsupportedModel, match=named):
        load_model(path, torch.float32)


def test_a_tensor_type_without_a_decoder_is_refused_by_its_name(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", {}, {"blk.0.attn_q.weight": ("F32", np.zeros((1, 32), np.float32))})
    content = bytearray(path.read_bytes())
    at = content.index(b"attn_q.weight") + len(b"attn_q.weight") + 4 + 16
    content[at : at + 4] = struct.pack("<I", 11)
    path.write_bytes(content)

    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight has type Q3_K"):
        GgufFile(path)


def test_unknown_missing_and_misshapen_tensors_are_refused_by_name(tmp_path: Path):
    good = gguf_tensors(hf_weights())
    extra = good | {"rope_extra.weight": ("F32", np.ones(4, np.float32))}
    missing = {name: value for name, value in good.items() if name != "blk.1.ffn_up.weight"}
    misshapen = good | {"blk.0.ffn_up.weight": ("F32", np.zeros((INNER, INNER), np.float32))}
    named = {
        "rope_extra.weight": extra,
        "model.layers.1.mlp.up_proj.weight": missing,
        "layers.0.mlp.up_proj": misshapen,
    }

    for name, tensors in named.items():
        with pytest.raises(UnsupportedModel, match=name):
            load_model(write_gguf(tmp_path / "m.gguf", METADATA, tensors), torch.float32)


def test_a_file_cut_anywhere_is_refused_and_never_read_past_its_end(tmp_path: Path):
    whole = write_gguf(tmp_path / "m.gguf", METADATA, gguf_tensors(hf_weights())).read_bytes()
    rng = np.random.default_rng(0)

    for size in [0, 3, 8, 23, 24, *rng.integers(25, len(whole) - 1024, 60)]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(UnsupportedModel):
            load_model(tmp_path / "cut.gguf", torch.float32)


def test_a_source_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UnsupportedModel):
        load_model(tmp_path / "none", torch.float32)


@needs_default_gguf
def test_the_default_model_loads_with_its_published_sizes():
    loaded = load_model(DEFAULT_GGUF, torch.bfloat16)

    assert loaded.revision == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert sum(tensor.numel() for tensor in loaded.weights.values()) == 134_515_008
    assert (loaded.config.num_layers, loaded.config.hidden_size, loaded.config.vocab_size) == (30, 576, 49152)
    assert (loaded.config.rms_norm_eps, loaded.config.rope.theta) == (1e-5, 100_000.0)
    assert loaded.config.eos_token_ids == (2,)
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.weights.values())


# ── Hugging Face directories ─────────────────────────────────────────────────────────────────────


def shard(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_sharded_directory_is_read_whole(tmp_path: Path):
    weights = hf_weights()
    directory = hf_directory(tmp_path / "m", weights)
    shard(directory, weights)

    loaded = load_model(directory, torch.float32)

    assert all(torch.equal(loaded.weights[name], weights[name]) for name in weights)


def test_the_revision_of_a_directory_changes_with_its_config_and_with_every_shard(tmp_path: Path):
    weights = hf_weights()
    first = hf_directory(tmp_path / "a", weights)
    other_config = hf_directory(tmp_path / "b", weights, HF_CONFIG | {"rope_theta": 1e4})
    other_weights = hf_directory(tmp_path / "c", weights | {"model.norm.weight": torch.ones(HIDDEN)})
    same = hf_directory(tmp_path / "d", weights)

    revisions = [load_model(path, torch.float32).revision for path in (first, other_config, other_weights, same)]

    assert revisions[0] == revisions[3]
    assert len(set(revisions)) == 3


def test_a_tied_models_stored_head_is_left_out_and_end_tokens_come_from_both_configs(tmp_path: Path):
    directory = hf_directory(tmp_path / "m", hf_weights() | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)})
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')

    loaded = load_model(directory, torch.float32)

    assert "lm_head.weight" not in loaded.weights
    assert loaded.config.eos_token_ids == (2, 7)


def test_what_a_directory_lacks_or_has_too_much_is_refused_by_name(tmp_path: Path):
    directory = hf_directory(tmp_path / "m", hf_weights())
    config, tokenizer = directory / "config.json", directory / "tokenizer.json"

    cases = [(config, '{"quantization_config": {"quant_method": "gptq"}}', "quantization_config"),
             (config, json.dumps(HF_CONFIG | {"hidden_act": "gelu"}), "hidden_act"),
             (config, "{", "config.json"), (config, "[]", "config.json"),
             (tokenizer, "{", "tokenizer.json")]  # fmt: skip
    for path, content, named in cases:
        original = path.read_text()
        path.write_text(content)
        with pytest.raises(UnsupportedModel, match=named):
            load_model(directory, torch.float32)
        path.write_text(original)
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (directory / name).rename(tmp_path / "away")
        with pytest.raises(UnsupportedModel, match=name):
            load_model(directory, torch.float32)
        (tmp_path / "away").rename(directory / name)


def test_an_index_cannot_name_a_file_outside_its_directory(tmp_path: Path):
    directory = hf_directory(tmp_path / "m", hf_weights())
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')

    with pytest.raises(UnsupportedModel, match=r"\.\./other"):
        load_model(directory, torch.float32)


def test_integer_weights_are_refused_by_name(tmp_path: Path):
    weights = hf_weights() | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}

    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has dtype int8"):
        load_model(hf_directory(tmp_path / "m", weights), torch.float32)
