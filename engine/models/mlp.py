"""The MLP of a dense layer."""

from torch import Tensor

from engine.models.linear import Linear, LoraStep
from kernels.silu_mul import silu_mul


class GatedMlp:
    """down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, lora: LoraStep) -> Tensor:
        return self.down(self._inner(x, lora), lora)

    def onto(self, residual: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """As of its last product: ``Linear.onto``."""
        return self.down.onto(residual, self._inner(x, lora), lora)

    def _inner(self, x: Tensor, lora: LoraStep) -> Tensor:
        gate_up, low = self.gate_up.apart(x, lora)
        return silu_mul(gate_up, low)

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down
