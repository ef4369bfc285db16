"""What the routes beside the completions answer, and what every failure looks like: msgspec structs."""

from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from engine.wire.adapters import Tier

Item = TypeVar("Item")
Seconds: TypeAlias = Annotated[int, Meta(ge=0, description="Unix seconds")]
Nanoseconds: TypeAlias = Annotated[int, Meta(ge=0)]
State: TypeAlias = Literal["completed", "cancelled", "lost", "failed"]
Sha256: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ErrorDetail(Struct, frozen=True):
    """``reasons``: only where there are several."""

    message: str
    type: str
    param: str | None
    code: str | None
    reasons: list[str] | UnsetType = UNSET


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


class Health(Struct, frozen=True):
    status: Literal["ok", "draining"]


class Listed(Struct, Generic[Item], frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]


class ModelBody(Struct, frozen=True, kw_only=True):
    """A served base model (``max_model_len`` as soon as an engine was seen), or an adapter on its ``parent``."""

    id: str
    object: Literal["model"] = "model"
    created: Seconds
    owned_by: Literal["tenora", "you"]
    max_model_len: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class AdapterBody(Struct, frozen=True, kw_only=True):
    """One version of an adapter."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    version: Annotated[int, Meta(ge=1)]
    sha256: Sha256
    base_model: str
    lora_rank: Annotated[int, Meta(ge=1)]
    target_modules: list[str]
    num_pairs_bound: Annotated[int, Meta(ge=0)]
    size_bytes: Annotated[int, Meta(ge=0)]
    status: Literal["ready"] = "ready"
    warnings: list[str]
    created_at: Seconds


class Residency(Struct, frozen=True):
    """The tiers of one engine that hold the weights; none: it will fetch them."""

    replica: str
    tiers: list[Tier]


class LiveVersion(AdapterBody, frozen=True, kw_only=True):
    residency: list[Residency]


class AdapterDetail(AdapterBody, frozen=True, kw_only=True):
    versions: list[LiveVersion]


class AdapterFile(Struct, frozen=True, kw_only=True):
    """A file that waits for its commit."""

    object: Literal["adapter.file"] = "adapter.file"
    adapter: str
    file: str
    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Sha256
    expires_at: Seconds


class Deleted(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class UsageResult(Struct, frozen=True, kw_only=True):
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: None = None
    api_key_id: str | None
    model: str | None
    batch: bool | None
    service_tier: str | None
    api_source: str | None


class Amount(Struct, frozen=True, kw_only=True):
    """``value`` is a float as OpenAI's is; ``picousd`` is exact."""

    value: float
    currency: Literal["usd"] = "usd"
    picousd: int


class CreditBody(Struct, frozen=True, kw_only=True):
    """``granted`` = ``free`` + ``reserved`` (by what runs) + ``spent``."""

    object: Literal["organization.credit"] = "organization.credit"
    currency: Literal["usd"] = "usd"
    granted_picousd: int
    spent_picousd: int
    reserved_picousd: int
    free_picousd: int


class CostResult(Struct, frozen=True, kw_only=True):
    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: Amount
    line_item: str | None
    project_id: str | None
    user_id: None = None
    api_key_id: str | None
    api_source: str | None


class Bucket(Struct, Generic[Item], frozen=True, kw_only=True):
    object: Literal["bucket"] = "bucket"
    start_time: Seconds
    end_time: Seconds
    results: list[Item]


class ReportPage(Struct, Generic[Item], frozen=True, kw_only=True):
    object: Literal["page"] = "page"
    data: list[Bucket[Item]]
    has_more: bool
    next_page: str | None


class ReceiptAdapter(Struct, frozen=True):
    id: str
    name: str
    version: int


class ReceiptTokens(Struct, frozen=True):
    input: int
    cached: int
    output: int


class ReceiptPhases(Struct, frozen=True):
    """Nanoseconds; the others sum to ``total``."""

    queue: Nanoseconds
    prefill: Nanoseconds
    decode: Nanoseconds
    post: Nanoseconds
    network: Nanoseconds
    total: Nanoseconds


class ReceiptPrice(Struct, frozen=True):
    """``usd``: exact decimal text."""

    picousd: int
    usd: str
    billed: bool


class Receipt(Struct, frozen=True, kw_only=True, rename={"flow_class": "class"}):
    """What the ledger has of a request. ``status`` is an HTTP status, 499 when its caller left, 0 when it was lost."""

    id: str
    object: Literal["request"] = "request"
    status: int
    state: State
    operation: str
    model: str
    base_model: str
    adapter: ReceiptAdapter | None
    flow_class: str
    tokens: ReceiptTokens
    phases: ReceiptPhases
    time_to_first_token: Nanoseconds | None
    price: ReceiptPrice
    rate_card_id: str | None
    label: str | None
    trace_id: str | None
    attempt: int
    created_at: Seconds
    finished_at: Seconds
