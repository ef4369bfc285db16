"""Who pays for a step: its time to the requests in it, and to the accounts that no request pays."""

import numpy as np

from engine.adapter_pool import SlotLoad
from engine.metering import cost
from engine.metering.cost_fit import CostFit
from engine.metering.stats import StepBill
from engine.scheduler import StepPlan

_MIB = 1 << 20


class Attribution:
    """Weighs a plan when it is launched, shares its time when it has landed; the fit learns from both.

    Sequences share, not requests: who asks for eight choices in one request pays what eight requests would.
    """

    def __init__(self, num_slots: int) -> None:
        self.fit = CostFit()
        self._slot_mib = np.zeros(num_slots + 1)
        self._parts = np.zeros((len(cost.FEATURES), 0))  # of the last plan, without its experts

    def loaded(self, load: SlotLoad, plan: StepPlan, load_ns: int) -> None:
        """An adapter has been moved into its slot; the first that needs it pays for that."""
        self._slot_mib[load.slot] = load.weights.num_bytes / _MIB
        for chunk in plan.chunks:
            if chunk.sequence.adapter_key == load.key:
                chunk.sequence.request.load_ns += load_ns
                return

    def weigh(self, plan: StepPlan) -> cost.Floats:
        """``cost.parts`` of the plan, for every plan once, before its launch: afterwards sequences may lose their
        slots."""
        if plan.is_next:
            self._parts = cost.one_token_later(self._parts)
        else:
            self._parts = cost.parts(cost.shape_of(plan.chunks, plan.num_tokens), self._slot_mib)
        return self._parts

    def share(self, plan: StepPlan, parts: cost.Floats, expert_parts: cost.Floats | None, step_ns: int) -> StepBill:
        """Adds each chunk's share of a step that took ``step_ns`` to its request, to the last nanosecond.
        ``expert_parts`` as of a StepHandle."""
        if expert_parts is not None:
            parts[cost.EXPERT] = expert_parts
        shares = cost.split(step_ns, cost.weights(self.fit.coefficients @ parts))
        recompute_ns = lost_ns = 0
        for chunk, share_ns in zip(plan.chunks, shares, strict=True):
            request = chunk.sequence.request
            own_ns = share_ns
            if chunk.num_recomputed:
                again_ns = share_ns * chunk.num_recomputed // chunk.num_tokens
                request.recompute_ns += again_ns
                recompute_ns += again_ns
                own_ns -= again_ns
            if request.num_unfinished:
                request.gpu_ns += own_ns
            else:
                lost_ns += own_ns
        if step_ns:
            self.fit.observe(cost.features(parts), step_ns)
        return StepBill(recompute_ns, lost_ns)
