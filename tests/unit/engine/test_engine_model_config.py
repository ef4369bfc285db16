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
