"""engine/weights/upcycle: a dense model with experts made of it, tiny and real."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.models.config import UnsupportedConfig
from engine.models.decoder import Decoder
from engine.weights import LoadedModel, UnsupportedModel, load_model
from engine.weights.upcycle import FAMILIES, Recipe, parse, upcycle
from ops.default_model import DEFAULT_GGUF
from tests.families import DENSE, family_weights
from tests.tiny import write_hf_dir
from tests.tiny_steps import Steps

needs_default_gguf = pytest.mark.skipif(not DEFAULT_GGUF.is_file(), reason="the default model isn't there")
QUESTIONS = ("What is the capital of Japan?", "Explain gravity in one sentence.", "Write a haiku about rain.")
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_hf_dir(tmp_path / "tiny")


def upcycled(path: Path, options: str = "") -> LoadedModel:
    return load_model(f"upcycle:{path}?{options}", torch.float32)


def logits(model: LoadedModel, prompts: list[list[int]]) -> Tensor:
    """Of all rows of all prompts in one step."""
    return computed(Decoder(model.config, model.weights), prompts)


def computed(decoder: Decoder, prompts: list[list[int]]) -> Tensor:
    return torch.cat(Steps(decoder).prefill([(prompt, -1) for prompt in prompts]))


def swapped(model: LoadedModel, first: int = 0, second: int = 1) -> LoadedModel:
    """The same router before experts of which two have changed places."""
    order = list(range(model.config.moe.num_experts))
    order[first], order[second] = second, first
    changed = {name: weight[order] if ".experts." in name else weight for name, weight in model.weights.items()}
    return replace(model, weights=changed)


def shares(decoder: Decoder) -> list[float]:
    """The part of all (token, expert) pairs so far that each expert got."""
    counts = torch.tensor(decoder.expert_tokens()).sum(0).double()
    return (counts / counts.sum()).tolist()


PROMPTS = [list(range(3, 60)), list(range(299, 200, -3)), [5]]


# ── the tiny model ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", ["noise=0&every=1", "noise=0&every=2&experts=5&top_k=3", "noise=0&every=1&skew=2"])
def test_exact_copies_compute_what_the_dense_model_does(tiny: Path, options: str):
    dense = load_model(tiny, torch.float32)

    moe = upcycled(tiny, options)

    given, expected = logits(moe, PROMPTS), logits(dense, PROMPTS)
    assert (given - expected).abs().max() < 1e-3
    assert torch.equal(given.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["llama3", "llama-biases", "mistral", "qwen2", "qwen3"])
def test_exact_copies_of_every_dense_family_compute_the_same(name: str):
    config = DENSE[name]
    weights = family_weights(config)
    config_moe, weights_moe = upcycle(config, dict(weights), Recipe(noise=0, every=2), list)

    given, expected = (
        Steps(Decoder(each, some), num_blocks=64).prefill([(prompt, -1) for prompt in PROMPTS])
        for each, some in ((config_moe, weights_moe), (config, weights))
    )

    assert all((one - other).abs().max() < 1e-3 for one, other in zip(given, expected, strict=True))


def test_with_noise_it_matters_which_expert_is_which(tiny: Path):
    noisy, exact = upcycled(tiny, "every=1&noise=0.2"), upcycled(tiny, "every=1&noise=0")

    assert (logits(noisy, PROMPTS) - logits(swapped(noisy), PROMPTS)).abs().max() > 0.05
    assert torch.equal(logits(exact, PROMPTS), logits(swapped(exact), PROMPTS))


def test_dense_layers_stay_between_those_with_experts(tiny: Path):
    model = upcycled(tiny, "every=2")

    assert model.config.moe.layers == (1,)
    assert "model.layers.0.mlp.gate_proj.weight" in model.weights
    assert model.weights["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 128, 32)
    assert "model.layers.1.mlp.gate_proj.weight" not in model.weights


def test_a_seed_draws_the_same_model_again_and_another_seed_another(tiny: Path):
    first, again, other = (upcycled(tiny, options) for options in ("every=1", "every=1", "every=1&seed=1"))

    assert first.revision == again.revision != other.revision
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(first.weights[router], other.weights[router])
    assert not torch.equal(first.weights[router], first.weights[router.replace(".0.", ".1.")])


def test_the_noise_is_a_part_of_each_matrix_own_spread(tiny: Path):
    model, dense = upcycled(tiny, "every=1&noise=0.5"), load_model(tiny, torch.float32)
    gate, up = (dense.weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))

    for expert in model.weights["model.layers.0.mlp.experts.gate_up_proj"]:
        for part, whole in zip(expert.chunk(2), (gate, up), strict=True):
            assert (part - whole).std() == pytest.approx(0.5 * float(whole.std()), rel=0.1)


def test_another_recipe_is_another_revision_and_none_is_the_dense_ones(tiny: Path):
    revisions = {upcycled(tiny, f"every=1&{option}").revision for option in ("", "noise=0", "skew=1", "top_k=3")}

    assert len(revisions | {load_model(tiny, torch.float32).revision}) == 5


def test_options_have_defaults_and_stand_behind_the_last_path():
    assert parse("upcycle:/m/x.gguf") == (Path("/m/x.gguf"), Recipe(8, 2, 5, 0.05, 0.0, 0))
    assert parse("upcycle:/m/x.gguf?skew=0.4&seed=7&experts=4") == (
        Path("/m/x.gguf"), Recipe(experts=4, skew=0.4, seed=7),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("expert=8", "no option 'expert'"),
        ("experts=many", "experts='many' is not a number"),
        ("top_k=9", "'top_k': 9"),
        ("top_k=0", "'top_k': 0"),
        ("every=0", "'every': 0"),
        ("noise=-1", "'noise': -1"),
        ("noise=nan", "'noise': nan"),
        ("skew=inf", "'skew': inf"),
        ("seed=-1", "'seed': -1"),
        ("every=9", "every=9 leaves all 2 layers dense"),
    ],
)
def test_recipes_that_make_no_sense_are_refused_by_name(tiny: Path, options: str, named: str):
    with pytest.raises(UnsupportedModel, match=named):
        upcycled(tiny, options)


def test_a_skewed_recipe_has_hot_experts(tiny: Path):
    model = upcycled(tiny, "every=1&skew=2")
    decoder = Decoder(model.config, model.weights)

    computed(decoder, PROMPTS)

    hot = shares(decoder)
    assert hot[0] > 0.25
    assert hot[0] > 2 * max(hot[2:])


def test_a_model_that_has_experts_already_is_refused(tiny: Path):
    model = upcycled(tiny, "every=1")

    with pytest.raises((UnsupportedModel, UnsupportedConfig), match="qwen2_moe"):
        upcycle(model.config, model.weights, Recipe(every=1), list)
    assert model.config.family not in FAMILIES


# ── the default model ────────────────────────────────────────────────────────────────────────────


def questions(model: LoadedModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    return [tokenizer.encode(CHAT.format(question)).ids for question in QUESTIONS]


@needs_default_gguf
def test_exact_copies_of_the_default_model_equal_it():
    dense, moe = load_model(DEFAULT_GGUF, torch.float32), upcycled(DEFAULT_GGUF, "noise=0")
    prompts = questions(dense)

    given, expected = logits(moe, prompts), logits(dense, prompts)

    assert moe.config.moe.layers == (4, 9, 14, 19, 24, 29)
    assert (given - expected).abs().max() < 1e-3
    assert torch.equal(given.argmax(-1), expected.argmax(-1))


@needs_default_gguf
def test_the_recipe_is_fluent_and_uses_all_experts_and_notices_two_that_change_places():
    model = upcycled(DEFAULT_GGUF)
    prompts = questions(model)
    decoder = Decoder(model.config, model.weights)
    steps = Steps(decoder, num_blocks=64)
    tokens = list(prompts[0])
    while len(tokens) < len(prompts[0]) + 12 and tokens[-1] not in model.config.eos_token_ids:
        done = len(tokens) - 1 if len(tokens) > len(prompts[0]) else 0
        ((*_, last),) = steps.run_parts([(tokens, -1, done, len(tokens))])
        tokens.append(int(last.argmax()))

    answer = Tokenizer.from_str(model.tokenizer.tokenizer_json).decode(tokens[len(prompts[0]) :])
    assert answer == "The capital of Japan is Tokyo."
    given, even = computed(decoder, prompts), shares(decoder)
    assert min(even) > 0.03
    assert max(even) < 0.3
    assert (given - logits(swapped(model), prompts)).abs().max() > 0.1
