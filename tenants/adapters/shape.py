"""What a base model can take: its adaptable modules by their names in the canonical file."""

from collections.abc import Collection
from dataclasses import dataclass

PARTS = ("gate_proj", "up_proj", "down_proj")  # of an expert


def expert_module(expert: int, part: str) -> str:
    """The canonical name of one linear of one expert; a layer's others have their plain name."""
    return f"experts.{expert}.{part}"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of a base model, gated MLPs of hidden_size → width → hidden_size, in ``layers``.

    ``served``: whether its engine computes LoRA on them. Where it doesn't, such adapters are read and then refused.
    ``max_lora_rank``: of theirs, where that is another limit than of other modules; 0: it isn't.
    """

    num_experts: int
    hidden_size: int
    width: int
    layers: Collection[int]
    served: bool = False
    max_lora_rank: int = 0

    @property
    def num_modules(self) -> int:
        return len(self.layers) * self.num_experts * len(PARTS)

    def size_of(self, part: str) -> tuple[int, int]:
        """(in, out)."""
        return (self.width, self.hidden_size) if part == "down_proj" else (self.hidden_size, self.width)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """``modules`` maps each linear that an adapter may have in every layer to (in, out).

    ``served_models`` are the names the base model goes by; an adapter trained on another name gets a warning.
    """

    modules: dict[str, tuple[int, int]]
    num_layers: int
    max_lora_rank: int
    served_models: frozenset[str] = frozenset()
    experts: ExpertShape | None = None

    @property
    def max_tensors(self) -> int:
        experts = 0 if self.experts is None else self.experts.num_modules
        return 2 * (self.num_layers * len(self.modules) + experts)

    def size_of(self, module: str) -> tuple[int, int]:
        """(in, out) of a module by its canonical name."""
        if self.experts is not None and module.startswith("experts."):
            return self.experts.size_of(module.rpartition(".")[2])
        return self.modules[module]
