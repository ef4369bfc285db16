"""How one request is judged: is it valid, was it good, and which samples it gives. Pure, and the only place for it.

A request is *excluded* when its caller broke it off early, or when it was refused for the caller's own doing. What is
left is *valid*. Of the valid ones:

- availability: bad are 5xx, shed, lost and broken ones, and those that a caller gave up after the promised time;
- TTFT has a sample where a token was flushed to a stream;
- TPOT where one choice has two tokens or more: several choices share one span, so that none of theirs is known;
- E2E where the answer was given to its end.

A lost request gives no sample: what is known of its times depends on which process reports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from tenants.slo.objectives import Objective, Sli

Exclusion: TypeAlias = Literal["", "caller_error", "own_limit", "left_early"]
PHASES = ("queue", "prefill", "decode", "network", "post")
MEASURES = ("ttft", "tpot", "e2e", *PHASES)

_LOST, _ANSWERED, _LEFT, _NOT_LOADED = 0, 200, 499, 409
_OURS = ("adapter_corrupt", "adapter_unavailable")  # 409, and no doing of the caller's


class Facts(Protocol):
    """What is known of a request that an engine took: a SettledRequest, or a receipt. ``outcome`` is the HTTP status,
    499 when the caller left, 0 when a crash of ours cut it off."""

    outcome: int
    output_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    network_ns: int
    post_ns: int
    first_token_ns: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """``results``: by SLI the objective's version ('' = none is in force) and whether it was kept; no entry where the
    request is no sample. ``met``: answered, and every objective kept. ``samples`` are ns by measure."""

    excluded: Exclusion = ""
    results: dict[Sli, tuple[str, bool]] = field(default_factory=dict)
    met: bool = False
    samples: dict[str, int] = field(default_factory=dict)


def judge(facts: Facts, streamed: bool, num_choices: int, objectives: Mapping[Sli, Objective]) -> Verdict:
    """The verdict on one dispatch of a request, by the objectives in force in the minute in which it ended."""
    excluded = _excluded(facts, streamed, objectives)
    if excluded:
        return Verdict(excluded)
    available = _was_served(facts, streamed)
    results: dict[Sli, tuple[str, bool]] = {"availability": (_version(objectives, "availability"), available)}
    for sli, objective in objectives.items():
        kept = _kept(facts, sli, streamed, num_choices, objective.threshold_ns)
        if kept is not None:
            results[sli] = (objective.version_id, kept)
    met = facts.outcome == _ANSWERED and all(kept for _, kept in results.values())
    return Verdict("", results, met, _samples(facts, streamed, num_choices))


def judge_refusal(status: int, reason: str, objectives: Mapping[Sli, Objective]) -> Verdict:
    """The verdict on a request that no engine took: refused (``reason`` is the error's code), or given up by its
    caller before that (499)."""
    excluded = "left_early" if status == _LEFT else "" if reason in _OURS else _exclusion_of(status)
    if excluded:
        return Verdict(excluded)
    return Verdict("", {"availability": (_version(objectives, "availability"), False)})


def total_ns(facts: Facts) -> int:
    """From the body's end to the last byte."""
    return facts.queue_ns + facts.prefill_ns + facts.decode_ns + facts.network_ns + facts.post_ns


def _exclusion_of(status: int) -> Exclusion:
    """402 and 429 are the tenant's own limits; ours are 503."""
    if status in (402, 429):
        return "own_limit"
    return "caller_error" if 400 <= status < 499 else ""


def _excluded(facts: Facts, streamed: bool, objectives: Mapping[Sli, Objective]) -> Exclusion:
    if facts.outcome == _LEFT:
        return "" if _was_served(facts, streamed) or _waited_in_vain(facts, streamed, objectives) else "left_early"
    # what an engine took ends with 409 only when we could not load the adapter
    return "" if facts.outcome == _NOT_LOADED else _exclusion_of(facts.outcome)


def _was_served(facts: Facts, streamed: bool) -> bool:
    """Answered, or left when the answer had begun to come."""
    return facts.outcome == _ANSWERED or (facts.outcome == _LEFT and streamed and facts.first_token_ns > 0)


def _waited_in_vain(facts: Facts, streamed: bool, objectives: Mapping[Sli, Objective]) -> bool:
    """The caller left without anything, but not before the time that it was promised something by."""
    promised = objectives.get("ttft" if streamed else "e2e")
    return promised is not None and total_ns(facts) > promised.threshold_ns


def _kept(facts: Facts, sli: Sli, streamed: bool, num_choices: int, threshold_ns: int) -> bool | None:
    """None: no sample. TPOT is compared without a division."""
    if facts.outcome == _LOST or sli == "availability":
        return None
    if sli == "ttft":
        return facts.first_token_ns <= threshold_ns if _has_ttft(facts, streamed) else None
    if sli == "tpot":
        gaps = facts.output_tokens - 1
        return facts.decode_ns <= threshold_ns * gaps if _has_tpot(facts, num_choices) else None
    return total_ns(facts) <= threshold_ns if facts.outcome == _ANSWERED else None


def _samples(facts: Facts, streamed: bool, num_choices: int) -> dict[str, int]:
    if facts.outcome == _LOST:
        return {}
    samples: dict[str, int] = {}
    if _has_ttft(facts, streamed):
        samples["ttft"] = facts.first_token_ns
    if _has_tpot(facts, num_choices):
        samples["tpot"] = facts.decode_ns // (facts.output_tokens - 1)
    if facts.outcome == _ANSWERED:
        samples["e2e"] = total_ns(facts)
        samples |= {phase: getattr(facts, f"{phase}_ns") for phase in PHASES}
    return samples


def _has_ttft(facts: Facts, streamed: bool) -> bool:
    return streamed and facts.first_token_ns > 0


def _has_tpot(facts: Facts, num_choices: int) -> bool:
    return num_choices == 1 and facts.output_tokens >= 2


def _version(objectives: Mapping[Sli, Objective], sli: Sli) -> str:
    objective = objectives.get(sli)
    return objective.version_id if objective else ""
