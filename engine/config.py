"""What an engine is built with. Resolved before construction, never changed afterwards."""

from dataclasses import dataclass

HOST_ADAPTER_BYTES = 2 << 30
DISK_ADAPTER_BYTES = 8 << 30
MAX_EXPERT_RANK = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and bounds of one engine, in tokens, blocks, slots and bytes.

    ``max_step_tokens`` bounds prefill and decode tokens of a step together; no more sequences run than it has
    tokens, so that every decode finds room in every step. ``max_backfill`` is how many waiting sequences that
    don't fit are passed over in a step, ``max_overtakes`` how many admissions one of them lets pass before it
    holds back everybody behind it. The first ``expert_adapter_slots`` of the slots may hold adapters on experts, up to
    ``max_expert_rank`` on a GPU; None: all of them, as on a CPU.

    Raises ValueError for sizes with which nothing could ever run.
    """

    block_size: int = 16
    num_blocks: int = 1024
    context_tokens: int = 8192
    max_step_tokens: int = 512
    max_running: int = 64
    adapter_slots: int = 8
    max_lora_rank: int = 64
    expert_adapter_slots: int | None = None
    max_expert_rank: int = MAX_EXPERT_RANK
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4_000_000
    deterministic: bool = False
    host_adapter_bytes: int = HOST_ADAPTER_BYTES
    max_backfill: int = 16
    max_overtakes: int = 64

    def __post_init__(self) -> None:
        positive = ("block_size", "num_blocks", "context_tokens", "max_step_tokens", "max_running", "max_backfill")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.adapter_slots < 0:
            raise ValueError(f"adapter_slots is {self.adapter_slots}, at least 0 is needed")
        if not 0 <= (self.expert_adapter_slots or 0) <= self.adapter_slots:
            raise ValueError(f"{self.expert_adapter_slots} slots for adapters on experts, of {self.adapter_slots}")
        if self.max_expert_rank < 1:
            raise ValueError(f"max_expert_rank is {self.max_expert_rank}, at least 1 is needed")

    @property
    def pool_tokens(self) -> int:
        """Tokens whose keys and values fit into the pool."""
        return self.block_size * self.num_blocks

    @property
    def max_sequences(self) -> int:
        """Sequences that run at the same time at most."""
        return min(self.max_running, self.max_step_tokens)
