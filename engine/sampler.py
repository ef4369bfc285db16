"""Logits → tokens. A row's result depends on that row alone: its logits, its parameters, its tokens, its seed.

Order of the steps, as vLLM's: bias, min_tokens mask, repetition, frequency and presence penalties, the grammar's mask;
then, for rows that aren't greedy, temperature, min-p, top-k, top-p; then one draw. Log-probabilities are of the raw
logits, before any of it.

A draw is a function of (seed, output position): a counter-based generator, so that preemption, recomputation
and batch mates can't change it.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from engine.sequence import Sequence
from engine.wire import SamplingParams, TokenLogprobs
from kernels.timing import timed

Sampled = tuple[int, TokenLogprobs | None]

_NO_LOGIT = -math.inf
MIN_TEMPERATURE = 1e-5  # below it a row is greedy: logits / temperature would leave fp32


class Sampler:
    """Draws the next token of each row. ``eos_token_ids`` are the model's own; min_tokens masks them too."""

    def __init__(self, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._eos_token_ids = eos_token_ids

    @timed("sampling")
    def sample(self, logits: Tensor, rows: Rows[Sequence]) -> list[Sampled]:
        """logits [R, V] fp32 (left unchanged), row r for ``rows[r]`` → (token id, log-probabilities if wanted).

        A NaN is no logit at all; a row whose highest logit is not finite gives that, the lowest id of equal ones.
        """
        tokens = self._choose(logits, rows)
        wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs >= 0]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for index in wanted:
            logprobs[index] = _one_score(logits[index], tokens[index], rows[index].sampling.logprobs)
        return list(zip(tokens, logprobs, strict=True))

    def score(self, logits: Tensor, targets: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """Log-probability of ``targets[r]`` under row r, with the ``num_top`` best alternatives."""
        return tuple(_one_score(row, target, num_top) for row, target in zip(logits, targets, strict=True))

    def _choose(self, logits: Tensor, rows: Rows[Sequence]) -> list[int]:
        adjusted = [index for index, row in enumerate(rows) if self._is_adjusted(row)]
        if adjusted:
            logits = logits.clone()
            for index in adjusted:
                self._adjust(logits[index], rows[index])
        highest = logits.amax(dim=-1, keepdim=True)
        if bool(highest.isnan().any()):  # amax gives NaN for a row that holds one
            logits = logits.nan_to_num(nan=_NO_LOGIT, posinf=math.inf, neginf=_NO_LOGIT)
            highest = logits.amax(dim=-1, keepdim=True)
        tokens = _greedy(logits, highest)
        drawn = [index for index, row in enumerate(rows) if not is_greedy(row.sampling)]
        plain = [index for index in drawn if not is_filtered(rows[index].sampling)]
        for index, token in zip(plain, _draw_plain(logits[plain], [rows[i] for i in plain]), strict=True):
            tokens[index] = tokens[index] if token is None else token
        for index in set(drawn).difference(plain):
            token = _draw_filtered(logits[index], rows[index])
            tokens[index] = tokens[index] if token is None else token
        return tokens

    def _is_adjusted(self, row: Sequence) -> bool:
        sampling = row.sampling
        if row.matcher is not None:
            return True
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        return bool(sampling.logit_bias) or penalties != (0.0, 0.0, 1.0) or row.num_output_tokens < sampling.min_tokens

    def _adjust(self, logits: Tensor, row: Sequence) -> None:
        """Bias, mask and penalties of one row [V], in place."""
        sampling = row.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        if row.num_output_tokens < sampling.min_tokens:
            logits[list(self._eos_token_ids + sampling.stop_token_ids)] = _NO_LOGIT
        if sampling.repetition_penalty != 1.0:
            _penalise_repetition(logits, row.token_ids, sampling.repetition_penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            _penalise_counts(logits, row.output_ids, sampling)
        mask = row.matcher.mask() if row.matcher is not None else b""
        if mask:
            constrain(logits, mask)


def constrain(logits: Tensor, mask: bytes) -> None:
    """Leaves only the tokens of ``mask`` [a bit each, lowest first]. Where none of them has a logit left (min_tokens
    took it, or it is NaN) all of them are equal: what is drawn is always of the mask."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed[:, None] >> bits & 1).flatten()[: len(logits)].bool()
    logits.masked_fill_(~allowed, _NO_LOGIT)
    nothing_left = ~(logits > _NO_LOGIT).any()
    logits.masked_fill_(allowed & nothing_left, 0.0)


def _penalise_repetition(logits: Tensor, token_ids: list[int], penalty: float) -> None:
    """Every token of prompt and output: a positive logit is divided, a negative multiplied (CTRL, 1909.05858)."""
    ids = torch.tensor(list(set(token_ids)), device=logits.device)
    seen = logits[ids]
    logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_counts(logits: Tensor, output_ids: list[int], sampling: SamplingParams) -> None:
    """OpenAI's formula over the output so far: −frequency·count − presence·[count > 0]."""
    counts = Counter(output_ids)
    if not counts:
        return
    ids = torch.tensor(list(counts), device=logits.device)
    times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
    logits[ids] -= times * sampling.frequency_penalty + sampling.presence_penalty


def _greedy(logits: Tensor, highest: Tensor) -> list[int]:
    """The lowest id with the highest logit [R, 1] of each row, none of them NaN."""
    # argmax alone doesn't promise which of several maxima it returns
    return (logits == highest).to(torch.uint8).argmax(dim=-1).tolist()


def is_greedy(sampling: SamplingParams) -> bool:
    """Nothing is drawn."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1


def is_filtered(sampling: SamplingParams) -> bool:
    """Some tokens are not drawn at all."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_plain(logits: Tensor, rows: Rows[Sequence]) -> list[int | None]:
    """Rows [R, V] with nothing but a temperature, all at once; None where there is nothing to draw from."""
    if not rows:
        return []
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    return _pick((logits / temperatures[:, None]).softmax(dim=-1), rows)


def _draw_filtered(logits: Tensor, row: Sequence) -> int | None:
    """A row [V] by min-p, top-k and top-p, in this order; what is left is drawn from in the order of ids. None when
    there is nothing to draw from."""
    scaled = logits / row.sampling.temperature
    if not math.isfinite(float(scaled.amax())):
        return None
    ids = _candidates(scaled, row.sampling)
    probabilities = (scaled if ids is None else scaled[ids]).softmax(dim=-1)
    if row.sampling.top_p < 1.0:
        nucleus = _nucleus(probabilities, row.sampling.top_p)
        ids, probabilities = nucleus if ids is None else ids[nucleus], probabilities[nucleus]
    if ids is not None:
        ids, order = ids.sort()
        probabilities = probabilities[order]
    (picked,) = _pick(probabilities[None], [row])
    return picked if picked is None or ids is None else int(ids[picked])


def _candidates(scaled: Tensor, sampling: SamplingParams) -> Tensor | None:
    """Ids at least min_p times as likely as the best, and among the top_k (ties to the lowest id); None = all."""
    least = scaled.amax() + math.log(sampling.min_p) if sampling.min_p > 0.0 else None
    if 0 < sampling.top_k < len(scaled):
        ids = _highest(scaled, sampling.top_k)
        return ids if least is None else ids[scaled[ids] >= least]
    return None if least is None else (scaled >= least).nonzero().squeeze(-1)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Indices of the shortest head of the descending order whose sum reaches ``top_p``; at least one."""
    for size in (256, 4096, len(probabilities)):  # a whole sort costs more than all the rest
        head = _highest(probabilities, size)
        sums = probabilities[head].double().cumsum(dim=-1)
        if float(sums[-1]) >= top_p:
            break
    return head[: int((sums < top_p).sum()) + 1]


def _highest(values: Tensor, size: int) -> Tensor:
    """Indices of the ``size`` highest, best first, equal ones by index (topk alone doesn't promise that)."""
    if size >= len(values):
        return values.sort(descending=True, stable=True).indices
    edge = values.topk(size).values[-1]
    candidates = (values >= edge).nonzero().squeeze(-1)
    return candidates[values[candidates].sort(descending=True, stable=True).indices[:size]]


def _pick(probabilities: Tensor, rows: Rows[Sequence]) -> list[int | None]:
    """The index in each row [R, N] at which its own uniform number falls; None for a row without numbers."""
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    numbers = [uniform(row.seed, row.num_output_tokens) for row in rows]
    marks = total * torch.tensor(numbers, dtype=torch.float64, device=total.device)[:, None]
    last = torch.searchsorted(cumulative, total)  # the last with a probability: a mark may round up to the total
    picked = torch.minimum(torch.searchsorted(cumulative, marks, right=True), last).squeeze(-1).tolist()
    usable = total.isfinite().squeeze(-1).tolist()
    return [index if good else None for index, good in zip(picked, usable, strict=True)]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to an output position of a seeded choice: 53 bits of a hash."""
    counter = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"tenora-draw-1").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _one_score(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    if num_top <= 0:
        return TokenLogprobs(token, float(logprobs[token]))
    best = _highest(logprobs, num_top)
    return TokenLogprobs(token, float(logprobs[token]), tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True)))
