"""From quantities to charges: pure integer arithmetic. 1 USD = 10¹² picousd."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tenants.errors import InvalidValue

Meter: TypeAlias = Literal["input_uncached_tokens", "input_cached_tokens", "output_tokens", "requests"]
METERS: tuple[Meter, ...] = get_args(Meter)
ANY = "*"

# Together they keep every amount, and a request's sum of them, within BIGINT: 2 × 2²⁵ × 10¹¹ + 10¹¹ < 2⁶³.
MAX_QUANTITY = 1 << 25
MAX_PRICE_PICOUSD = 10**11
PICOUSD_PER_USD = 10**12

DEFAULT_PRICES: dict[Meter, int] = {  # picousd a unit: $0.05 / $0.025 / $0.10 a million tokens, $1 a million requests
    "input_uncached_tokens": 50_000,
    "input_cached_tokens": 25_000,
    "output_tokens": 100_000,
    "requests": 1_000_000,
}

PriceKey: TypeAlias = tuple[str, str, str]  # (meter, base model | "*", class | "*")


@dataclass(frozen=True, slots=True)
class RateCard:
    """One immutable version of the prices. Every meter has a price for (*, *), so no lookup can fail."""

    rate_card_id: str
    version: int
    effective_unix_ns: int
    prices: Mapping[PriceKey, int]
    currency: str = "USD"

    def __post_init__(self) -> None:
        for meter in METERS:
            if (meter, ANY, ANY) not in self.prices:
                raise InvalidValue(meter, "needs a price for every model and class (*, *)")
        for (meter, _, _), price in self.prices.items():
            if meter not in METERS:
                raise InvalidValue(meter, f"is no meter; meters are {', '.join(METERS)}")
            if not 0 <= price <= MAX_PRICE_PICOUSD:
                raise InvalidValue(meter, f"a price lies between 0 and {MAX_PRICE_PICOUSD} picousd")

    def price(self, meter: Meter, model: str, flow_class: str) -> int:
        """Picousd a unit: the most exact item wins, the model before the class."""
        for key in ((meter, model, flow_class), (meter, model, ANY), (meter, ANY, flow_class)):
            if key in self.prices:
                return self.prices[key]
        return self.prices[meter, ANY, ANY]


@dataclass(frozen=True, slots=True)
class Quantities:
    """What is billed of one request. ``cached_tokens`` are among ``prompt_tokens``."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Charge:
    meter: Meter
    quantity: int
    unit_price_picousd: int
    amount_picousd: int


def default_prices() -> dict[PriceKey, int]:
    return {(meter, ANY, ANY): price for meter, price in DEFAULT_PRICES.items()}


def is_billed(outcome: int, output_tokens: int) -> bool:
    """200 is billed; 499 (the caller left) when a token was made; our failures and refusals never."""
    return outcome == 200 or (outcome == 499 and output_tokens > 0)


def charges(quantities: Quantities, card: RateCard, model: str, flow_class: str) -> list[Charge]:
    """One charge a meter with something in it, in the order of METERS: amount = quantity × unit price, exactly."""
    metered: dict[Meter, int] = {
        "input_uncached_tokens": quantities.prompt_tokens - quantities.cached_tokens,
        "input_cached_tokens": quantities.cached_tokens,
        "output_tokens": quantities.output_tokens,
        "requests": 1,
    }
    lines = []
    for meter, quantity in metered.items():
        assert 0 <= quantity <= MAX_QUANTITY, f"{meter} of {quantity}"
        if quantity:
            price = card.price(meter, model, flow_class)
            lines.append(Charge(meter, quantity, price, quantity * price))
    return lines
