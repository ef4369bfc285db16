"""The step model's coefficients, learned from the engine's own steps, and how wrong the model was about them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.metering.cost import FEATURES, Floats
from engine.wire import Family

# ns, of an 8B model on an H200: only the proportions count, and only until the first fit
PRIOR = {
    "step": 5e6,
    "sequence": 2e3,
    "token": 2.2e4,
    "key": 30.0,
    "pair": 1.0,
    "lora": 30.0,
    "adapter": 6e4,
    "adapter_mib": 400.0,
    "expert": 1e4,
}
FIT_STEPS = (32, 64, 128, 256)  # the first fits; then after every BLOCK_STEPS
BLOCK_STEPS = 256
MEMORY_STEPS = 1 << 16  # a step's weight falls to a third in so many: hardware and load change
ERROR_STEPS = 1 << 10
REWEIGHTINGS = 4  # the weights of a block's steps depend on the coefficients that are looked for
OUTLIER = 3.0
_RIDGE = 1e-9  # of a feature's own weight: what the steps can't tell apart gets equal parts


class CostFit:
    """Least squares with coefficients ≥ 0: ``coefficients`` as FEATURES.

    Errors count in proportion to what is predicted, since shares are of a step's time, whatever it is; and what took
    over three times the prediction, for a reason from outside, counts as three times. All is a function of the steps
    seen, in their order. ``error_ratio`` and ``r_squared`` are of predictions with coefficients found before the step,
    over about the last 1,024 steps; 0 before there are any.
    """

    def __init__(self) -> None:
        self.coefficients: Floats = np.array([PRIOR[name] for name in FEATURES])
        self.num_steps = 0
        self._block = np.empty((BLOCK_STEPS, len(FEATURES)))
        self._block_ns = np.empty(BLOCK_STEPS)
        self._num_in_block = 0
        self._products = np.zeros((len(FEATURES), len(FEATURES)))  # normal equations
        self._sums = np.zeros(len(FEATURES))
        self._errors = np.zeros(5)  # decaying sums over steps: 1, |error| / y, error², y, y²

    def observe(self, features: Floats, step_ns: int) -> None:
        """A step that took ``step_ns`` > 0; in one of BLOCK_STEPS the coefficients are found anew (1 ms)."""
        self._block[self._num_in_block] = features
        self._block_ns[self._num_in_block] = step_ns
        self._num_in_block += 1
        self.num_steps += 1
        if self.num_steps in FIT_STEPS or self._num_in_block == BLOCK_STEPS:
            self._take(self._block[: self._num_in_block], self._block_ns[: self._num_in_block])
            self._num_in_block = 0

    def _take(self, rows: Floats, steps_ns: Floats) -> None:
        is_first = self.num_steps == FIT_STEPS[0]
        if not is_first:
            self._measure(rows @ self.coefficients, steps_ns)
        keep = (1 - 1 / MEMORY_STEPS) ** len(rows)
        before, before_sums = self._products * keep, self._sums * keep
        scale = steps_ns if is_first else np.maximum(rows @ self.coefficients, steps_ns)
        seen_ns = steps_ns
        for _ in range(REWEIGHTINGS):
            scaled = rows / scale[:, None]
            self._products = before + scaled.T @ scaled
            self._sums = before_sums + scaled.T @ (seen_ns / scale)
            self.coefficients = solve(self._products, self._sums)
            scale = np.maximum(rows @ self.coefficients, 1.0)
            seen_ns = np.clip(steps_ns, scale / OUTLIER, scale * OUTLIER)

    def _measure(self, predicted_ns: Floats, steps_ns: Floats) -> None:
        errors = predicted_ns - steps_ns
        parts = np.ones_like(steps_ns), np.abs(errors) / steps_ns, errors**2, steps_ns, steps_ns**2
        self._errors = self._errors * (1 - 1 / ERROR_STEPS) ** len(steps_ns) + np.sum(parts, axis=1)

    @property
    def error_ratio(self) -> float:
        """Mean |predicted - measured| / measured."""
        return float(self._errors[1] / self._errors[0]) if self._errors[0] else 0.0

    @property
    def r_squared(self) -> float:
        """The part of the variance of the steps' times that the model explains; below 0 it is worse than their mean."""
        count, _, squared_error, total, squares = self._errors.tolist()
        variance = squares - total * total / count if count else 0.0
        return 1 - squared_error / variance if variance > 0 else 0.0

    def families(self) -> Iterable[Family]:
        yield _gauge(
            "tenora_cost_model_error_ratio", "Mean error of the step cost model's predictions", self.error_ratio
        )
        yield _gauge("tenora_cost_model_r2_ratio", "Variance of step times that the model explains", self.r_squared)
        values = zip(FEATURES, (self.coefficients / 1e9).tolist(), strict=True)
        samples = [("", {"term": term}, value) for term, value in values]
        yield Family("tenora_cost_model_seconds", "gauge", "Coefficients of the step cost model", samples)


def solve(products: Floats, sums: Floats) -> Floats:
    """The x ≥ 0 that minimises x'Px - 2s'x (Lawson and Hanson's active sets, on normal equations). Columns that no step
    had are 0."""
    scale = np.sqrt(products.diagonal())
    scale[scale == 0] = np.inf
    matrix = products / np.outer(scale, scale)
    matrix[np.diag_indices_from(matrix)] += _RIDGE
    target = sums / scale
    found = np.zeros(len(sums))
    free = np.zeros(len(sums), bool)
    for _ in range(3 * len(sums)):
        slope = np.where(free, -np.inf, target - matrix @ found)
        best = int(slope.argmax())
        if slope[best] <= 1e-12:
            break
        free[best] = True
        found = _inside(matrix, target, found, free)
    return found / scale


def _inside(matrix: Floats, target: Floats, found: Floats, free: NDArray[np.bool_]) -> Floats:
    """The minimum over the ``free`` ones, from ``found`` on; those that would fall below 0 are let go."""
    while True:
        wanted = np.zeros_like(found)
        wanted[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        falling = free & (wanted <= 0)
        if not falling.any():
            return wanted
        ratio = np.min(found[falling] / (found[falling] - wanted[falling]))
        found = found + ratio * (wanted - found)
        free &= found > 1e-15
        found[~free] = 0.0


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [("", {}, value)])
