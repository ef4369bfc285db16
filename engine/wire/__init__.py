"""Messages between a gateway and an engine: length-prefixed msgpack, one tagged struct a frame.

How frames and token ids are written is ``framing.py``'s; its names are also found here.

Life of a request, seen on the wire (G = gateway, E = engine):

    G → E  Submit
    E → G  Rejected                      never accepted: no record, nothing more follows
         | StepFrame* (Delta, PromptScores)  then Finished: exactly one, always
    G → E  Grant | Abort                 any time between
    G → E  Close                         after Finished: the engine now journals the UsageRecord
    E → G  Record                        to any connected gateway, again and again until
    G → E  Ack                           the ledger has it

No torch, no tenant, no HTTP: ``flow``, ``cache_namespace``, ``context`` and adapter keys are opaque.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from engine.wire.adapters import (  # noqa: F401 (the wire's other half)
    ADAPTER_CHUNK_BYTES,
    AdapterChunk,
    AdapterForget,
    AdapterUnavailable,
    AdapterWanted,
    ResidencyReply,
    ResidencyRequest,
    Tier,
)
from engine.wire.cards import ExpertCard, ModelCard, TokenizerCard  # noqa: F401 (names of the wire)
from engine.wire.framing import Frames, WireError, frame, pack_ids, unpack_ids  # noqa: F401 (names of the wire too)
from engine.wire.records import TimeRecord, UsageRecord, read_record  # noqa: F401 (names of the wire)

PROTOCOL_VERSION = 1
ACCEPTED_VERSIONS = frozenset({1})  # N and N-1, once there are two
MAX_CONTEXT_BYTES = 512

FlowClass: TypeAlias = Literal["interactive", "standard", "batch"]
FinishReason: TypeAlias = Literal["", "stop", "length", "abort", "error"]
Role: TypeAlias = Literal["gateway", "observer"]


class Flow(Struct, frozen=True, array_like=True):
    """Whose turn: an opaque key, its weight among its class, and the class. Never a tenant's name."""

    key: str
    weight: int = 1
    flow_class: FlowClass = "standard"


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How one choice's tokens are drawn. Every number is checked by the gateway before it comes here.

    ``max_tokens`` is the hard bound of each choice (0 = score the prompt only); ``temperature`` 0 is greedy
    with ties to the lowest id; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs`` and
    ``prompt_logprobs`` are numbers of alternatives, -1 = not wanted, 0 = the token's own only. ``grammar`` is what
    the output must be, in llguidance's words ("" = anything); its end ends the choice with ``stop``, whatever
    ``min_tokens`` and ``ignore_eos`` say, and one that costs too much ends it with ``length``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1
    prompt_logprobs: int = -1
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """One position: the token, its log-probability, and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(Struct, frozen=True):
    """What a request used, all choices together; the prompt of several choices is counted once.

    Durations in integer ns of the engine's monotonic clock: ``queue_ns`` ends when the first token of any
    choice is scheduled, ``prefill_ns`` at the first output token of any, ``decode_ns`` at the last of all.
    ``gpu_ns`` is the request's share of the steps it took part in; shares of a step sum to the step. ``load_ns`` is
    what moving its adapter took, ``recompute_ns`` its share of computing anew after preemptions: in neither, nor in
    ``gpu_ns``, is anything of the other two.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    gpu_ns: int = 0
    load_ns: int = 0
    recompute_ns: int = 0


class Exemplar(Struct, frozen=True, array_like=True):
    """One observation of a bucket: ``labels`` are the bucket's, ``of`` says whose it was, seen at ``unix_s``."""

    labels: dict[str, str]
    of: dict[str, str]
    value: float
    unix_s: float


class Family(Struct, frozen=True, omit_defaults=True):
    """One metric family as plain numbers: samples are (suffix, labels, value), suffix '' | '_bucket' | '_sum'
    | '_count' | '_total', buckets cumulative with label ``le``; ``exemplars`` are of buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: list[tuple[str, dict[str, str], float]]
    exemplars: list[Exemplar] = []


class Hello(Struct, frozen=True, tag="hello"):
    """First frame. A gateway serves adapters and gets records; observers ask for stats and say what to forget."""

    peer: str
    role: Role = "gateway"
    version: int = PROTOCOL_VERSION
    want_tokenizer: bool = False


class Submit(Struct, frozen=True, tag="submit"):
    """One request: every prompt × ``num_choices``. Choice index = prompt index × num_choices + i.

    ``granted_tokens`` are the output tokens that the gateway has reserved per choice; a choice that reaches
    them ends with ``length``, unless a Grant came before. ``adapter_key`` '' is the base model.
    """

    request_id: str
    prompts: list[bytes]
    sampling: SamplingParams
    flow: Flow
    cache_namespace: bytes
    granted_tokens: int
    num_choices: int = 1
    adapter_key: str = ""
    context: bytes = b""


class Grant(Struct, frozen=True, tag="grant"):
    """Raises ``granted_tokens`` (per choice, absolute, never lowered)."""

    request_id: str
    granted_tokens: int


class Abort(Struct, frozen=True, tag="abort"):
    """Ends one choice (-1 = all) within two steps. The terminal events still come."""

    request_id: str
    choice: int = -1


class Close(Struct, frozen=True, tag="close"):
    """The gateway's last word on a request: how it ended for the caller, and the gateway's own times.

    ``admit_ns`` lies before Submit, ``network_ns`` on the stream, ``post_ns`` after Finished; with the
    engine's durations they sum to the total the gateway's clock framed. ``surplus_tokens`` are those that came
    behind a stop string before the engine heard of it: nobody asked for them, nobody pays for them.
    """

    request_id: str
    outcome: int  # HTTP status; 499 = the caller left
    admit_ns: int = 0
    network_ns: int = 0
    post_ns: int = 0
    first_token_ns: int = 0  # request fully read → first token flushed; 0 = none was
    surplus_tokens: int = 0


class Ack(Struct, frozen=True, tag="ack"):
    """The ledger has records up to and including ``number``, whose hash is ``hash``."""

    number: int
    hash: bytes


class StatsRequest(Struct, frozen=True, tag="stats"):
    seq: int


class Welcome(Struct, frozen=True, tag="welcome"):
    engine_id: str
    version: int
    card: ModelCard
    tokenizer: TokenizerCard | None = None


class Rejected(Struct, frozen=True, tag="rejected"):
    """Not accepted: ``code`` is busy | draining | too_long | invalid | invalid_grammar."""

    request_id: str
    code: str
    message: str


class Delta(Struct, frozen=True, array_like=True):
    """New tokens of one choice in one step; with a finish reason it is that choice's last.

    The token that stopped it is among ``token_ids`` and is named by ``stop_token_id`` (-1 = none): it is
    counted, and not text.
    """

    request_id: str
    choice: int
    token_ids: bytes
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason = ""
    stop_token_id: int = -1


class PromptScores(Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens from position 1 on (position 0 has none)."""

    request_id: str
    prompt_index: int
    logprobs: tuple[TokenLogprobs, ...]


class StepFrame(Struct, frozen=True, tag="step"):
    """All that one step has for one gateway; a prompt's scores come before the deltas of its choices."""

    deltas: list[Delta]
    scores: list[PromptScores] = []


class Finished(Struct, frozen=True, tag="finished"):
    """Terminal: all choices have ended. ``error_code`` '' is success, else what ended it (adapter_corrupt,
    adapter_unavailable, adapter_delayed, invalid_adapter, internal)."""

    request_id: str
    usage: Usage
    error_code: str = ""
    error_message: str = ""


class Record(Struct, frozen=True, tag="record"):
    """A journal entry, delivered until acknowledged. ``payload`` is what ``read_record`` reads."""

    number: int
    hash: bytes
    payload: bytes


class MemoryRefusal(Struct, frozen=True):
    """A request that the engine had no room for: in the block pool (too_long) or in its queue (busy)."""

    code: str
    message: str
    unix_s: int


class StatsReply(Struct, frozen=True, tag="stats_reply"):
    """``refusal``: the last one for memory since the process's start."""

    seq: int
    families: list[Family]
    refusal: MemoryRefusal | None = None


OUTCOME_LOST = 0

ToEngine: TypeAlias = (
    Hello | Submit | Grant | Abort | Close | AdapterChunk | AdapterUnavailable | AdapterForget | Ack | StatsRequest
    | ResidencyRequest
)  # fmt: skip
ToGateway: TypeAlias = Welcome | Rejected | StepFrame | Finished | AdapterWanted | Record | StatsReply | ResidencyReply

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)


def encode(message: ToEngine | ToGateway) -> bytes:
    """A message as one frame, length first."""
    return frame(_encoder.encode(message))


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises WireError for anything that is no message of ours."""
    return _decode(_to_engine, body)


def decode_to_gateway(body: bytes) -> ToGateway:
    """Raises WireError for anything that is no message of ours."""
    return _decode(_to_gateway, body)


def _decode(decoder: msgspec.msgpack.Decoder, body: bytes):
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:  # ValidationError and DecodeError
        raise WireError(str(error)) from error
