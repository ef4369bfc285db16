"""Logits → tokens without a wait: the sampler's rules as operations on rows, for a device that runs beside the host.

``engine/sampler.py`` is the reference: the same steps in the same order, and the same number for each draw, which is
a function of (seed, output position) and therefore known before the logits are.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.sampler import constrain, is_greedy, uniform
from engine.sequence import Sequence
from engine.wire import TokenLogprobs
from kernels.sampling import Edits, SamplingRows, edit_logits, highest, sample

_NO_LOGIT = float("-inf")
_BELOW_1 = 1.0 - 2.0**-24
_ALIGNED = 16  # fp32: 64 bytes


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
        if all(is_greedy(row.sampling) for row in rows):
            return highest(logits)
        return sample(logits, self._settings(rows))

    def _is_adjusted(self, row: Sequence) -> bool:
        return bool(row.sampling.logit_bias) or row.needs_history or row.num_output_tokens < row.sampling.min_tokens

    def _adjusted(self, logits: Tensor, rows: Rows[Sequence]) -> Tensor:
        """Bias, mask, penalties and the grammar's mask, in this order, in a copy."""
        logits = logits.clone()
        edits = [(index, *edit) for index, row in enumerate(rows) for edit in self._edits(row)]
        if edits:
            numbers, tokens, *values = zip(*edits, strict=True)
            edit_logits(logits, Edits(self._ints(numbers), self._ints(tokens), *map(self._floats, values)))
        for index, row in enumerate(rows):
            mask = row.matcher.mask() if row.matcher is not None else b""
            if mask:
                constrain(logits[index], mask)
        return logits

    def _edits(self, row: Sequence) -> Iterator[tuple[int, float, float, float]]:
        """(token, what is added, repetition penalty, what is taken off), no token twice."""
        sampling = row.sampling
        biases = dict(sampling.logit_bias)
        if row.num_output_tokens < sampling.min_tokens:
            biases |= dict.fromkeys(self._eos_token_ids + sampling.stop_token_ids, _NO_LOGIT)
        seen = set(row.token_ids) if sampling.repetition_penalty != 1.0 else ()
        counted = sampling.frequency_penalty or sampling.presence_penalty
        counts = Counter(row.output_ids) if counted else Counter()
        for token in {*biases, *seen, *counts}:
            count = counts[token]
            minus = count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
            yield token, biases.get(token, 0.0), sampling.repetition_penalty if token in seen else 1.0, minus

    def _settings(self, rows: Rows[Sequence]) -> SamplingRows:
        settings = [row.sampling for row in rows]
        numbers = (min(uniform(row.seed, row.num_output_tokens), _BELOW_1) for row in rows)  # fp32 may round up to 1
        return SamplingRows(
            self._floats([0.0 if is_greedy(one) else one.temperature for one in settings]),
            self._ints([one.top_k for one in settings]).int(),
            self._floats([one.top_p for one in settings]),
            self._floats([one.min_p for one in settings]),
            self._floats(list(numbers)),
        )

    def _ints(self, numbers: Rows[int]) -> Tensor:
        return _sent(torch.tensor(numbers, dtype=torch.int64), self._device)

    def _floats(self, numbers: Rows[float]) -> Tensor:
        return _sent(torch.tensor(numbers, dtype=torch.float32), self._device)


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
    missing = -logits.shape[1] % _ALIGNED  # a row's sum is taken in an order that depends on where its memory begins
    logprobs = F.pad(logits.float(), (0, missing), value=_NO_LOGIT).log_softmax(dim=-1)
    ids, values = targets[:, None], logprobs.gather(1, targets[:, None])
    if num_top > 0:
        # a whole sort: topk does not promise which of equal ones it takes
        best = logprobs[:, : logits.shape[1]].sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
        ids, values = torch.cat((ids, best), 1), torch.cat((values, logprobs.gather(1, best)), 1)
    return Scores(to_host(ids), to_host(values))


def to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory that is complete when the device has come so far."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


def _sent(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
