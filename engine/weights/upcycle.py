"""A model with experts out of a dense one, made at load: ``upcycle:PATH?experts=8&top_k=2&every=5&noise=0.05``.

Every fifth layer's MLP becomes experts: copies of it with seeded noise, so that it matters which ones a token goes to,
under a seeded random router. The other layers stay dense. Without noise the model computes what the dense one does,
since the weights of the chosen experts sum to 1. After "sparse upcycling" (Komatsuzaki et al., 2022).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.models.config import ModelConfig, MoeConfig
from engine.weights.errors import UnsupportedModel

SCHEME = "upcycle:"
ROUTER_STD = 0.02
# dense → the family of the same attention whose layers may have experts
FAMILIES = {"llama": "qwen2_moe", "mistral": "qwen2_moe", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """``every``: the last of so many layers gets experts. ``noise``: standard deviation as a part of the weight's own.
    ``skew``: pull of the router towards experts of low number, in logits; of SmolLM2's tokens, 0.4 sends nearly all to
    the first expert, 2 to the first two and hardly any elsewhere. ``seed`` draws noise and router."""

    experts: int = 8
    top_k: int = 2
    every: int = 5
    noise: float = 0.05
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts <= 1024 or self.every < 1 or not 0 <= self.seed < 1 << 63:
            raise UnsupportedModel(f"{SCHEME} 1 <= top_k <= experts <= 1024, every >= 1 and seed >= 0: {asdict(self)}")
        if not (0 <= self.noise <= 10 and 0 <= self.skew <= 100):
            raise UnsupportedModel(f"{SCHEME} noise is 0 to 10 and skew 0 to 100: {asdict(self)}")


def parse(source: str) -> tuple[Path, Recipe]:
    """``upcycle:PATH`` with options behind the last ``?`` → the dense model's path, and the recipe. Raises
    UnsupportedModel for an option that is none."""
    path, _, options = source.removeprefix(SCHEME).partition("?")
    kinds = {field.name: type(field.default) for field in fields(Recipe)}
    values = {}
    for option in filter(None, options.split("&")):
        name, _, text = option.partition("=")
        if name not in kinds:
            raise UnsupportedModel(f"{SCHEME} has no option {name!r}: {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)  # int or float
        except ValueError:
            raise UnsupportedModel(f"{SCHEME} {name}={text!r} is not a number") from None
    return Path(path), Recipe(**values)


def upcycle(
    config: ModelConfig, weights: Weights, recipe: Recipe, mean_inputs: Callable[[], list[Tensor]]
) -> tuple[ModelConfig, Weights]:
    """The config and weights of the model with experts; ``weights`` loses the MLPs that they replace.

    ``mean_inputs`` gives the mean input [H] of each layer's MLP and is asked for a skewed router only. Raises
    UnsupportedModel for a family that has no counterpart with experts.
    """
    if config.family not in FAMILIES or config.moe is not None:
        raise UnsupportedModel(f"{SCHEME} of a {config.family} model: made of {', '.join(FAMILIES)}")
    layers = tuple(range(recipe.every - 1, config.num_layers, recipe.every))
    if not layers:
        raise UnsupportedModel(f"{SCHEME} every={recipe.every} leaves all {config.num_layers} layers dense")
    means = mean_inputs() if recipe.skew else []
    for layer in layers:
        draw = torch.Generator().manual_seed(recipe.seed * 10_007 + layer)
        mean = means[layer] if means else None
        router = _router(config.hidden_size, recipe, mean, draw)  # drawn before the noise: the same for any noise
        prefix = f"model.layers.{layer}.mlp"
        gate, up, down = (weights.pop(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
        weights[f"{prefix}.experts.gate_up_proj"] = _copies((gate, up), recipe, draw)
        weights[f"{prefix}.experts.down_proj"] = _copies((down,), recipe, draw)
        weights[f"{prefix}.gate.weight"] = router.to(gate.dtype)
    moe = MoeConfig(recipe.experts, recipe.top_k, config.intermediate_size, renormalize=True, layers=layers)
    return replace(config, family=FAMILIES[config.family], moe=moe), weights


def _copies(parts: Iterable[Tensor], recipe: Recipe, draw: torch.Generator) -> Tensor:
    """[E, rows of all parts, in]: each expert its own noise."""
    weight = torch.cat(tuple(parts))
    stds = torch.cat([part.float().std().expand(part.shape[0], 1) for part in parts])
    copies = weight.new_empty(recipe.experts, *weight.shape)
    for copy in copies:
        noise = torch.randn(weight.shape, generator=draw) if recipe.noise else 0.0
        copy.copy_(weight + recipe.noise * stds * noise)
    return copies


def _router(hidden_size: int, recipe: Recipe, mean: Tensor | None, draw: torch.Generator) -> Tensor:
    """[E, H]. ``mean`` · u = 1 for the direction u that is added, so that ``skew`` is in units of logits."""
    router = torch.randn(recipe.experts, hidden_size, generator=draw) * ROUTER_STD
    if mean is None:
        return router
    direction = mean.float() / mean.float().pow(2).sum()
    pull = 1 / torch.arange(1, recipe.experts + 1)
    return router + recipe.skew * (pull - pull.mean())[:, None] * direction
