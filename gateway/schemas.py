"""What callers send and get: msgspec structs, with the bounds of every field. Never imported outside gateway/.

Unknown fields are ignored. A known field of a wrong type or range raises ApiError 400 that names it.
"""

import functools
import re
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.errors import ApiError, invalid
from gateway.literals import literals_at

MAX_BODY_BYTES = 4 << 20
MAX_CHOICES = 128  # n, prompts, and prompts × n
MAX_MESSAGES = 2048

_INT64 = 1 << 63
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 30)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Label: TypeAlias = Annotated[str, Meta(max_length=512)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Tier: TypeAlias = Literal["auto", "default", "flex", "priority", "fast"]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, frozen=True):
    schema: dict[str, Any]
    name: FunctionName
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(Struct, frozen=True):
    name: FunctionName
    description: Annotated[str, Meta(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Struct, frozen=True):
    name: FunctionName


class NamedTool(Struct, frozen=True):
    type: Literal["function"]
    function: NamedFunction


class Part(Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    name: Label
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: Label | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None


class Common(Struct, frozen=True, kw_only=True):
    """What both completion routes take."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=128)] | None = None
    service_tier: Tier | None = None
    cache_salt: Label | None = None
    user: Label | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class Rollback(Struct, frozen=True):
    version: Annotated[int, Meta(ge=1, le=1 << 30)]
    expected_version: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None


class Commit(Struct, frozen=True):
    """What a multipart upload says in its fields; the files have come before. ``expected_version`` 0: must be new."""

    base_model: Name
    expected_version: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


class TokenLogprob(Struct, frozen=True):
    """A token of a chat answer; ``bytes`` are exact also where the token is a piece of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """The legacy shape: four arrays of one length. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """What clients look for there: no model here reasons apart from its answer."""

    reasoning_tokens: int = 0


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class AnswerCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct, frozen=True):
    """``tool_calls`` UNSET is left out; ``content`` is null when there is nothing beside them."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class FunctionDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str


class CallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call's first has its id, type and name; the others only what they add to its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextChoice(Struct, frozen=True):
    """A choice of a text answer, whole or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


ChoiceBody = TypeVar("ChoiceBody")


class Answer(Struct, Generic[ChoiceBody], frozen=True):
    """A whole answer or one chunk. ``usage`` UNSET is left out; None is sent as null."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    system_fingerprint: str
    service_tier: str
    usage: UsageBody | UnsetType | None = UNSET


# ── reading ──────────────────────────────────────────────────────────────────────────────────────

Body = TypeVar("Body", bound=Struct)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_NO_LITERAL = "Invalid enum value "
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def decode(body: bytes, kind: type[Body]) -> Body:
    """A request body as its struct. Raises ApiError 400: ``invalid_json``, or naming the field."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"The request body is not valid JSON: {reason}", code="invalid_json") from None


@functools.cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


def _field_error(message: str, kind: type[Struct]) -> ApiError:
    """msgspec's words, with the field as param: the top-level name, and the way to it inside objects."""
    at = _PATH.search(message)
    path = at["path"] if at else ""
    literals = literals_at(kind, path) if message.startswith(_NO_LITERAL) else ()
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    if not path.startswith("messages["):
        path = path.split("[", 1)[0]
    text = _PATH.sub("", message)[:200]  # it may quote what the caller sent
    if literals:
        text = f"{text.removeprefix(_NO_LITERAL)} is not one of {', '.join(literals)}"
    return invalid(f"Invalid value for '{path}': {text}" if path else text, param=path or None)
