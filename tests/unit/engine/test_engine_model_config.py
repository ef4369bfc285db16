"""engine/models/config: what is read from config.json, and what is refused by name."""

import pytest
import torch

from engine.models.config import FAMILIES, Llama3Scaling, UnsupportedConfig, from_hf, module_sizes
from engine.models.decoder import PARTS
from tests.tiny import hf_config, tiny_config

TINY = hf_config(tiny_config(), torch.float32)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


NULL = object()  # null in JSON, unlike a key that is not there


def changed(**keys) -> dict:
    """The tiny config.json with other keys; None takes one away."""
    return {key: value for key, value in {**TINY, **keys}.items() if value is not None}


def test_the_tiny_config_comes_back():
    assert from_hf(TINY) == tiny_config()


def test_both_spellings_of_rope_mean_the_same():
    new = changed(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})

    assert from_hf(new) == from_hf(changed(rope_theta=5e5))


def test_llama_3_scaling_is_read_in_both_spellings():
    old = from_hf(changed(rope_theta=5e5, rope_scaling=SCALING))
    new = from_hf(changed(rope_theta=None, rope_parameters={**SCALING, "rope_theta": 5e5}))

    assert old == new
    assert old.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)


def test_missing_keys_have_the_defaults_of_hugging_face():
    config = from_hf(changed(num_key_value_heads=None, head_dim=None, tie_word_embeddings=None, rope_theta=None))

    assert config.attention.num_kv_heads == config.attention.num_heads == 4
    assert config.attention.head_dim == 8
    assert not config.tie_word_embeddings
    assert config.rope.theta == 10_000.0


QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": NULL}, None),
        ({"model_type": "mistral"}, 4096),  # transformers' default
        (QWEN2 | {"use_sliding_window": False}, None),
        (QWEN2, None),  # from layer 28 on, of which there are none
        (QWEN2 | {"max_window_layers": 2}, None),
        (QWEN2 | {"max_window_layers": 0}, 16),
        (QWEN2 | {"layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, 16),
    ],
)
def test_each_family_has_its_own_word_for_the_window(keys: dict, expected: int | None):
    raw = {key: None if value is NULL else value for key, value in {**changed(sliding_window=None), **keys}.items()}

    assert from_hf(raw).attention.sliding_window == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False, False)),
        ({"model_type": "qwen2"}, (True, False, False)),
        ({"model_type": "qwen3"}, (False, False, True)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, True)),
    ],
)
def test_each_family_has_its_own_biases_and_norms(keys: dict, expected: tuple):
    attention = from_hf(changed(**keys)).attention

    assert (attention.bias, attention.output_bias, attention.head_norms) == expected


def test_what_a_config_leaves_out_is_what_transformers_takes():
    qwen3 = from_hf(changed(model_type="qwen3", head_dim=None, num_attention_heads=64, num_key_value_heads=None))

    assert (qwen3.attention.head_dim, qwen3.attention.num_kv_heads) == (128, 32)


@pytest.mark.parametrize(("given", "expected"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_end_tokens_may_be_one_several_or_none(given, expected):
    assert from_hf(changed(eos_token_id=given)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"sliding_window": 16}, "sliding_window"),
        (QWEN2 | {"max_window_layers": 1}, "max_window_layers"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(keys: dict, named: str):
    with pytest.raises(UnsupportedConfig, match=named):
        from_hf(changed(**keys))


def test_every_family_that_is_accepted_has_its_parts():
    assert set(FAMILIES) == set(PARTS)


def test_module_sizes_are_in_and_out():
    assert module_sizes(tiny_config()) == {
        "q_proj": (32, 32),
        "k_proj": (32, 16),
        "v_proj": (32, 16),
        "o_proj": (32, 32),
        "gate_proj": (32, 64),
        "up_proj": (32, 64),
        "down_proj": (64, 32),
    }
