"""From quantities to charges: pure integer arithmetic. 1 USD = 10¹² picousd."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

from tenants.errors import InvalidValue

Meter: TypeAlias = Literal["input_uncached_tokens", "input_cached_tokens", "output_tokens", "requests"]
AdapterMeter: TypeAlias = Literal["adapter_storage_byte_seconds", "adapter_residency_byte_seconds"]
METERS: tuple[Meter, ...] = get_args(Meter)  # of a request
ADAPTER_METERS: tuple[AdapterMeter, ...] = get_args(AdapterMeter)  # of an adapter version, by the hour
ANY = "*"

# Together they keep every amount, and a request's sum of them, within BIGINT: 2 × 2²⁵ × 10¹¹ + 10¹¹ < 2⁶³.
MAX_QUANTITY = 1 << 25
MAX_PRICE_PICOUSD = 10**11

# A byte-second costs far less than a picousd: adapters are priced by the megabyte-second, and each quantity of theirs
# is a whole number of those. 2⁴⁰ bytes × 3600 s / 10⁶ × 10⁷ picousd × 100 replicas < 2⁶³.
MEGABYTE = 10**6
MAX_ADAPTER_PRICE_PICOUSD = 10**7

DEFAULT_PRICES: dict[Meter | AdapterMeter, int] = {  # picousd for each ``unit_of`` the meter
    "input_uncached_tokens": 50_000,  # $0.05 a million
    "input_cached_tokens": 25_000,
    "output_tokens": 100_000,
    "requests": 1_000_000,  # $1 a million
    "adapter_storage_byte_seconds": 38,  # $0.10 a gigabyte and month
    "adapter_residency_byte_seconds": 1_900,  # $5 a gigabyte and month
}

PriceKey: TypeAlias = tuple[str, str, str]  # (meter, base model | "*", class | "*")


@dataclass(frozen=True, slots=True)
class RateCard:
    """One immutable version of the prices. Every meter of requests has a price for (*, *), so no lookup can fail; what
    has none of an adapter's meters is free."""

    rate_card_id: str
    version: int
    effective_unix_ns: int
    prices: Mapping[PriceKey, int]
    currency: str = "USD"
    _found: dict[PriceKey, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for meter in METERS:
            if (meter, ANY, ANY) not in self.prices:
                raise InvalidValue(meter, "needs a price for every model and class (*, *)")
        for (meter, _, _), price in self.prices.items():
            if meter not in METERS and meter not in ADAPTER_METERS:
                raise InvalidValue(meter, f"is no meter; meters are {', '.join((*METERS, *ADAPTER_METERS))}")
            most = MAX_PRICE_PICOUSD if meter in METERS else MAX_ADAPTER_PRICE_PICOUSD
            if not 0 <= price <= most:
                raise InvalidValue(meter, f"a price lies between 0 and {most} picousd")

    def price(self, meter: Meter | AdapterMeter, model: str, flow_class: str) -> int:
        """Picousd for each ``unit_of`` the meter: the most exact item wins, the model before the class."""
        asked = (meter, model, flow_class)
        price = self._found.get(asked)
        if price is None:
            price = self._found[asked] = self._find(*asked)
        return price

    def _find(self, meter: str, model: str, flow_class: str) -> int:
        for key in ((meter, model, flow_class), (meter, model, ANY), (meter, ANY, flow_class), (meter, ANY, ANY)):
            if key in self.prices:
                return self.prices[key]
        assert meter in ADAPTER_METERS
        return 0


class Quantities(Struct, frozen=True):
    """What is billed of one request. ``cached_tokens`` are among ``prompt_tokens``."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Charge(Struct, frozen=True):
    meter: Meter
    quantity: int
    unit_price_picousd: int
    amount_picousd: int


def unit_of(meter: str) -> int:
    """How much of a meter its price is for: amount × unit = quantity × price, without a remainder."""
    return MEGABYTE if meter in ADAPTER_METERS else 1


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


def price(outcome: int, quantities: Quantities, card: RateCard, model: str, flow_class: str) -> int:
    """Picousd of a request that ended so: the sum of its charges, 0 when it is not billed."""
    if not is_billed(outcome, quantities.output_tokens):
        return 0
    return sum(charge.amount_picousd for charge in charges(quantities, card, model, flow_class))
