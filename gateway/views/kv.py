"""How the admin API shows an engine's KV memory: how it is laid out, who has it, whom it had no room for."""

from typing import Any

from engine.wire import Family, MemoryRefusal, ModelCard, StatsReply


def kv_body(engine_id: str, card: ModelCard, report: StatsReply) -> dict[str, Any]:
    """``last_refusal``: null when there was none since the engine's start."""
    gauges = {family.name: family for family in report.families}
    return {
        "id": engine_id,
        "object": "engine.kv",
        "model": card.model,
        "layout": {
            "block_size": card.block_size,
            "num_blocks": card.num_blocks,
            "pool_tokens": card.block_size * card.num_blocks,
            "context_tokens": card.context_tokens,
            "num_layers": card.num_layers,
            "dtype": card.dtype,
            "device": card.device,
        },
        "blocks": _by_label(gauges["tenora_kv_blocks"], "state"),
        "blocks_in_use": _by_label(gauges["tenora_kv_blocks_in_use"], "class"),
        "fragmentation_ratio": gauges["tenora_kv_fragmentation_ratio"].samples[0][2],
        "last_refusal": _refusal_body(report.refusal),
    }


def _refusal_body(refusal: MemoryRefusal | None) -> dict[str, Any] | None:
    if refusal is None:
        return None
    return {"code": refusal.code, "message": refusal.message, "refused_at": refusal.unix_s}


def _by_label(family: Family, label: str) -> dict[str, int]:
    return {labels[label]: int(value) for _, labels, value in family.samples}
