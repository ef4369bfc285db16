"""The scale of each pair: alpha by pattern, the rank always from the tensor (a config may be wrong about it)."""

from tenants.adapters.bounded_json import clip_all
from tenants.adapters.config import AdapterSettings
from tenants.adapters.patterns import Patterns


class Scales:
    """What a config says of the modules that it is asked for; ``warnings`` are of all of them together."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._settings = settings
        self._ranks = Patterns(list(settings.rank_pattern))
        self._alphas = Patterns(list(settings.alpha_pattern))
        self._other_ranks: set[tuple[int, int]] = set()

    def of(self, path: str, lora_rank: int) -> float:
        """alpha/r, or alpha/√r when rank-stabilised (arXiv 2312.03732), of the module at ``path``."""
        settings = self._settings
        rank_key, alpha_key = self._ranks.find(path), self._alphas.find(path)
        declared = settings.rank if rank_key is None else settings.rank_pattern[rank_key]
        alpha = settings.alpha if alpha_key is None else settings.alpha_pattern[alpha_key]
        if declared != lora_rank:
            self._other_ranks.add((declared, lora_rank))
        return float(alpha) / (lora_rank**0.5 if settings.use_rslora else lora_rank)

    def warnings(self) -> list[str]:
        found = [
            f"the config says rank {declared} where tensors have {rank}; the tensors count"
            for declared, rank in sorted(self._other_ranks)[:20]
        ]
        for name, patterns in (("rank_pattern", self._ranks), ("alpha_pattern", self._alphas)):
            if patterns.unused():
                found.append(f"{name}: no module matches {clip_all(patterns.unused())}")
        return found
