"""Logits → tokens without a wait: the sampler's rules as operations on rows, for a device that runs beside the host.

``engine/sampler.py`` is the reference: the same steps in the same order, and the same number for each draw, which is
a function of (seed, output position) and therefore known before the logits are.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampler import constrain, is_filtered, is_greedy, uniform
from engine.sequence import Sequence
from engine.wire import TokenLogprobs

_NO_LOGIT = float("-inf")


def greedy(logits: Tensor) -> Tensor:
    """logits [R, V] of any float dtype → [R] int64: the lowest id with the highest logit; NaN is no logit at all."""
    return logits.nan_to_num(nan=_NO_LOGIT, posinf=float("inf"), neginf=_NO_LOGIT).argmax(dim=-1)


class DeviceSampler:
    """Draws the next token of each row on the device that the logits are on."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device

    def changes(self, rows: Rows[Sequence]) -> bool:
        """Some row is not simply the highest logit."""
        return any(not is_greedy(row.sampling) or self._is_adjusted(row) for row in rows)

    def sample(self, logits: Tensor, rows: Rows[Sequence]) -> Tensor:
        """logits [R, V] (left unchanged), row r for ``rows[r]`` → token ids [R] int64."""
        logits = logits.float()
        if any(self._is_adjusted(row) for row in rows):
            logits = self._adjusted(logits, rows)
        tokens = greedy(logits)
        plain = [index for index, row in enumerate(rows) if not (is_greedy(row.sampling) or is_filtered(row.sampling))]
        other = [index for index, row in enumerate(rows) if not is_greedy(row.sampling) and is_filtered(row.sampling)]
        for chosen, draw in ((plain, _draw_plain), (other, _draw_filtered)):
            if chosen:
                places = self._ints(chosen)
                drawn = draw(logits.index_select(0, places), [rows[index] for index in chosen])
                tokens.index_copy_(0, places, torch.where(drawn < 0, tokens.index_select(0, places), drawn))
        return tokens

    def _is_adjusted(self, row: Sequence) -> bool:
        return bool(row.sampling.logit_bias) or row.needs_history or row.num_output_tokens < row.sampling.min_tokens

    def _adjusted(self, logits: Tensor, rows: Rows[Sequence]) -> Tensor:
        """Bias, mask, penalties and the grammar's mask, in this order, in a copy."""
        logits = logits.clone()
        self._add_biases(logits, rows)
        self._mask_ends(logits, rows)
        for index, row in enumerate(rows):
            if row.needs_history:
                self._penalise(logits[index], row)
            mask = row.matcher.mask() if row.matcher is not None else b""
            if mask:
                constrain(logits[index], mask)
        return logits

    def _add_biases(self, logits: Tensor, rows: Rows[Sequence]) -> None:
        biases = [(index, *bias) for index, row in enumerate(rows) for bias in row.sampling.logit_bias.items()]
        if biases:
            places, tokens, values = zip(*biases, strict=True)
            where = self._ints(places), self._ints(tokens)
            logits[where] = logits[where] + self._floats(values)

    def _mask_ends(self, logits: Tensor, rows: Rows[Sequence]) -> None:
        masked = [
            (index, token)
            for index, row in enumerate(rows)
            if row.num_output_tokens < row.sampling.min_tokens
            for token in self._eos_token_ids + row.sampling.stop_token_ids
        ]
        if masked:
            places, tokens = zip(*masked, strict=True)
            logits.index_put_((self._ints(places), self._ints(tokens)), logits.new_tensor(_NO_LOGIT))

    def _penalise(self, logits: Tensor, row: Sequence) -> None:
        """One row [V], in place; all of its tokens are known (``Sequence.needs_history``)."""
        sampling = row.sampling
        if sampling.repetition_penalty != 1.0:
            seen = self._counts(logits, row.token_ids) > 0
            penalised = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits.copy_(torch.where(seen, penalised, logits))
        if (sampling.frequency_penalty or sampling.presence_penalty) and row.num_output_tokens:
            counts = self._counts(logits, row.output_ids)
            penalty = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
            logits.copy_(torch.where(counts > 0, logits - penalty, logits))

    def _counts(self, logits: Tensor, ids: list[int]) -> Tensor:
        """How often each token stands in ``ids``, [V] fp32: whole numbers, so that the order of adding is nothing."""
        places = self._ints(ids)
        ones = torch.ones(len(ids), dtype=torch.float32, device=logits.device)
        return torch.zeros_like(logits).scatter_add_(0, places, ones)

    def _ints(self, numbers: Rows[int]) -> Tensor:
        return _sent(torch.tensor(numbers, dtype=torch.int64), self._device)

    def _floats(self, numbers: Rows[float]) -> Tensor:
        return _sent(torch.tensor(numbers, dtype=torch.float32), self._device)


def _draw_plain(logits: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Rows with nothing but a temperature → ids [R], -1 where there is nothing to draw from."""
    temperatures = _column([row.sampling.temperature for row in rows], torch.float32, logits.device)
    return _pick((logits / temperatures).softmax(dim=-1), rows)


def _draw_filtered(logits: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Rows by min-p, top-k and top-p, in this order → ids [R], -1 where there is nothing to draw from."""
    device, num_ids = logits.device, logits.shape[1]
    scaled = logits / _column([row.sampling.temperature for row in rows], torch.float32, device)
    usable = scaled.amax(dim=-1).isfinite()
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    min_p = _column([row.sampling.min_p for row in rows], torch.float32, device)
    top_k = _column([row.sampling.top_k or num_ids for row in rows], torch.int64, device)
    top_p = _column([row.sampling.top_p for row in rows], torch.float64, device)
    kept = (values >= values[:, :1] + min_p.log()) & (torch.arange(num_ids, device=device) < top_k)
    probabilities = torch.where(kept, values, _NO_LOGIT).softmax(dim=-1)
    before = probabilities.double().cumsum(dim=-1) - probabilities
    # the shortest head whose sum reaches top_p: those before which it is not reached; the best always
    in_head = (before < top_p) | (top_p >= 1.0)
    in_head[:, 0] = True
    picked = _pick(torch.where(in_head, probabilities, 0.0), rows)
    found = ids.gather(1, picked.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(usable & (picked >= 0), found, -1)


def _pick(probabilities: Tensor, rows: Rows[Sequence]) -> Tensor:
    """The index in each row [R, N] at which its own uniform number falls; -1 for a row without numbers."""
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    numbers = [uniform(row.seed, row.num_output_tokens) for row in rows]
    marks = total * _column(numbers, torch.float64, total.device)
    last = torch.searchsorted(cumulative, total)  # the last with a probability: a mark may round up to the total
    picked = torch.minimum(torch.searchsorted(cumulative, marks, right=True), last)
    return torch.where(total.isfinite(), picked, -1).squeeze(1)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities on their way to the host; readable once the device has come so far. ids and values
    [R, 1 + alternatives]: the token's own first."""

    ids: Tensor
    values: Tensor

    def read(self) -> list[TokenLogprobs]:
        return [
            TokenLogprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))
            for ids, values in zip(self.ids.tolist(), self.values.tolist(), strict=True)
        ]


def score(logits: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Log-probability of ``targets`` [R] under logits [R, V], with the ``num_top`` best alternatives, best first, equal
    ones by id."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    ids, values = targets[:, None], logprobs.gather(1, targets[:, None])
    if num_top > 0:
        # a whole sort: topk does not promise which of equal ones it takes
        best = logprobs.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
        ids, values = torch.cat((ids, best), 1), torch.cat((values, logprobs.gather(1, best)), 1)
    return Scores(to_host(ids), to_host(values))


def to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory that is complete when the device has come so far."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


def _column(numbers: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _sent(torch.tensor(numbers, dtype=dtype), device)[:, None]


def _sent(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
