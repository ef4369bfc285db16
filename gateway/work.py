"""One shape for every request after decoding: body struct → Work. All that a caller can get wrong is found here."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias, TypeVar, cast

from msgspec import Struct

from engine.wire import FlowClass, SamplingParams
from gateway import schemas
from gateway.errors import ApiError, invalid
from gateway.models import TextSide
from gateway.sampling import check_ids, sampling_params
from gateway.schemas import MAX_CHOICES, ChatRequest, CompletionRequest
from gateway.targets import Target, Targets
from gateway.text.grammar import form_of_chat, form_of_text
from gateway.text.grammar_check import GrammarCheck
from gateway.text.tools import Tools
from tenants.directory import Principal

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy route has it
MAX_FIRST_GRANT_TOKENS = 1024
MAX_STOP_BYTES = 256
_INLINE_BYTES = 4096  # of a body; 1 to 2 ms of the event loop, where the way to a thread and back takes 0.3
_CLASSES: tuple[FlowClass, ...] = ("interactive", "standard", "batch")
TIER_OF: dict[FlowClass, str] = {"interactive": "priority", "standard": "default", "batch": "flex"}

Operation: TypeAlias = Literal["chat", "completions"]
Kind: TypeAlias = type[ChatRequest] | type[CompletionRequest]
Prompt: TypeAlias = list[int]
_Result = TypeVar("_Result")


class Style(Struct, frozen=True):
    """How the answer is written. ``tools`` None: it was offered none."""

    stream: bool
    include_usage: bool
    obfuscate: bool
    logprobs: bool
    echo: bool
    stops: tuple[str, ...]
    tools: Tools | None = None


class Work(Struct, frozen=True):
    """A request that can be run. Choice index = prompt index × num_choices + i; of these choices the ``num_best``
    likeliest of each prompt are the answer.

    ``granted_tokens`` are the output tokens that a choice may produce before more must be reserved.
    """

    operation: Operation
    principal: Principal
    target: Target
    text: TextSide
    prompts: tuple[Prompt, ...]
    num_choices: int
    num_best: int
    sampling: SamplingParams
    granted_tokens: int
    flow_class: FlowClass
    style: Style
    cache_salt: str

    @property
    def total_choices(self) -> int:
        return len(self.prompts) * self.num_choices

    @property
    def is_ranked(self) -> bool:
        """More choices are run than are given back."""
        return self.num_best < self.num_choices

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.total_choices * self.granted_tokens

    @property
    def service_tier(self) -> str:
        """The tier that was used, in OpenAI's words."""
        return TIER_OF[self.flow_class]


class Reader:
    """Bodies → Work. Raises ApiError 400 and 404; nothing has been reserved or sent by then."""

    def __init__(self, targets: Targets, grammars: GrammarCheck) -> None:
        self._targets = targets
        self._grammars = grammars

    async def read(self, kind: Kind, body: bytes, principal: Principal) -> Work:
        if kind is ChatRequest:
            chat = schemas.decode(body, ChatRequest)
            target = await self._targets.resolve(principal, chat.model)
            return await _read_chat(chat, len(body), principal, target, self._grammars)
        request = schemas.decode(body, CompletionRequest)
        target = await self._targets.resolve(principal, request.model)
        return await _read_text(request, len(body), principal, target, self._grammars)


async def _computed(body_bytes: int, compute: Callable[[], _Result]) -> _Result:
    """What a body's text takes long for, in a thread where there is much of it: others wait for the event loop."""
    return compute() if body_bytes <= _INLINE_BYTES else await asyncio.to_thread(compute)


async def _read_chat(
    request: ChatRequest, body_bytes: int, principal: Principal, target: Target, grammars: GrammarCheck
) -> Work:
    text = target.model.text()
    _refuse_unsupported_chat(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if text.chat is None:
        raise invalid(f"The model `{target.name}` has no chat template; use /v1/completions.", "model")
    _check_text_size(text, sum(map(_message_bytes, request.messages)), "messages")
    form = form_of_chat(request)
    told = form.tools.told() if form.tools and form.tools.may_call else ()
    prompt = await _computed(body_bytes, partial(text.chat.render, request.messages, told))
    wanted = request.max_completion_tokens or request.max_tokens
    max_tokens = _check_context([prompt], wanted, text, "messages")
    sampling = sampling_params(
        request,
        text,
        max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        prompt_logprobs=-1,
        grammar=form.grammar,
    )
    grant = max_tokens if wanted else min(max_tokens, principal.default_output_tokens, MAX_FIRST_GRANT_TOKENS)
    work = _work("chat", request, principal, target, [prompt], sampling, grant, form.tools)
    await grammars.check(principal.tenant_id, text, form)
    return work


async def _read_text(
    request: CompletionRequest, body_bytes: int, principal: Principal, target: Target, grammars: GrammarCheck
) -> Work:
    text = target.model.text()
    _refuse_unsupported_text(request)
    form = form_of_text(request.response_format)
    prompts = await _text_prompts(request.prompt, body_bytes, text)
    num_choices = _check_choices(request, len(prompts))
    wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    max_tokens = _check_context(prompts, wanted, text, "prompt")
    logprobs = -1 if request.logprobs is None else request.logprobs
    sampling = sampling_params(
        request,
        text,
        max_tokens,
        logprobs=max(logprobs, 0) if num_choices > (request.n or 1) else logprobs,
        prompt_logprobs=logprobs if request.echo else -1,
        grammar=form.grammar,
    )
    work = _work("completions", request, principal, target, prompts, sampling, max_tokens)
    await grammars.check(principal.tenant_id, text, form)
    return work


def _check_choices(request: CompletionRequest, num_prompts: int) -> int:
    """The choices that are run of each prompt. Raises ApiError 400."""
    n, num_choices = request.n or 1, _num_choices(request)
    if num_choices < n:
        raise invalid(f"'best_of' ({num_choices}) may not be smaller than 'n' ({n}).", "best_of")
    if num_choices > n and request.stream:
        raise invalid("Results of 'best_of' cannot be streamed: which are best is known at the end.", "best_of")
    if num_prompts * num_choices > MAX_CHOICES:
        raise invalid(f"prompts × n or best_of may be at most {MAX_CHOICES}.", "best_of" if num_choices > n else "n")
    return num_choices


def _work(
    operation: Operation,
    request: ChatRequest | CompletionRequest,
    principal: Principal,
    target: Target,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    granted_tokens: int,
    tools: Tools | None = None,
) -> Work:
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    style = Style(
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        obfuscate=options is None or options.include_obfuscation is not False,
        logprobs=request.logprobs is not None and request.logprobs is not False,
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        stops=_stops(request.stop),
        tools=tools,
    )
    return Work(
        operation=operation,
        principal=principal,
        target=target,
        text=target.model.text(),
        prompts=tuple(prompts),
        num_choices=_num_choices(request),
        num_best=request.n or 1,
        sampling=sampling,
        granted_tokens=granted_tokens,
        flow_class=_flow_class(request.service_tier, principal),
        style=style,
        cache_salt=request.cache_salt or "",
    )


def _num_choices(request: ChatRequest | CompletionRequest) -> int:
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return best_of or request.n or 1


def _flow_class(tier: str | None, principal: Principal) -> FlowClass:
    """Asked for by name: refused above the tenant's ``max_class``. By default: the key's class, lowered to it."""
    highest = _CLASSES.index(principal.max_class)
    if tier in (None, "auto", "default"):
        return _CLASSES[max(highest, _CLASSES.index(principal.flow_class))]
    wanted = _CLASSES.index("batch" if tier == "flex" else "interactive")
    if wanted < highest:
        raise invalid(f"The service tier '{tier}' is not open to this account.", "service_tier")
    return _CLASSES[wanted]


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(len(each.encode()) > MAX_STOP_BYTES for each in stops):
        raise invalid(f"A stop sequence may have at most {MAX_STOP_BYTES} bytes.", "stop")
    return stops


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


async def _text_prompts(prompt: str | list[str | int | list[int]], body_bytes: int, text: TextSide) -> list[Prompt]:
    """A text, a list of texts, a list of ids, or a list of lists of ids → lists of ids, none of them empty."""
    if isinstance(prompt, str):
        return [_not_empty(prompt_ids) for prompt_ids in await _encode([prompt], body_bytes, text)]
    if all(isinstance(item, int) for item in prompt):
        return [check_ids(cast(list[int], prompt), text, "prompt")]
    if len(prompt) > MAX_CHOICES:
        raise invalid(f"At most {MAX_CHOICES} prompts are allowed.", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return [_not_empty(prompt_ids) for prompt_ids in await _encode(cast(list[str], prompt), body_bytes, text)]
    if all(isinstance(item, list) for item in prompt):
        return [_not_empty(check_ids(cast(list[int], item), text, "prompt")) for item in prompt]
    raise invalid("'prompt' is one text, a list of texts, a list of token ids, or a list of such lists.", "prompt")


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt:
        raise invalid("A prompt must have at least one token.", "prompt")
    return prompt


async def _encode(prompts: list[str], body_bytes: int, text: TextSide) -> list[Prompt]:
    for prompt in prompts:
        _check_text_size(text, len(prompt.encode()), "prompt")
    return await _computed(body_bytes, lambda: list(map(text.tokenizer.encode_prompt, prompts)))


def _message_bytes(message: schemas.Message) -> int:
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [part.text or part.refusal or "" for part in content]
    return sum(len(part.encode()) for part in parts)


def _check_text_size(text: TextSide, num_bytes: int, param: str) -> None:
    """What can't fit whatever its tokens are is refused without being encoded."""
    limit = text.card.context_tokens * text.tokenizer.max_token_bytes
    if num_bytes > limit:
        context = text.card.context_tokens
        raise _too_long(f"maximum context length is {context} tokens. However, you sent {num_bytes} bytes", param)


def _check_context(prompts: Sequence[Prompt], wanted: int | None, text: TextSide, param: str) -> int:
    """Output tokens of each choice: what was asked for, or up to the context's end. Raises ApiError 400."""
    context, longest = text.card.context_tokens, max(map(len, prompts))
    output = max(1, context - longest) if wanted is None else wanted
    if longest + output > context:
        raise _too_long(
            f"maximum context length is {context} tokens. However, you requested {longest + output} tokens "
            f"({longest} in the {param}, {output} in the completion). Please reduce the length",
            param,
        )
    return output


def _too_long(what: str, param: str) -> ApiError:
    return invalid(f"This model's {what}.", param, "context_length_exceeded")


# ── what this server can't do ────────────────────────────────────────────────────────────────────


def _refuse(is_used: bool, param: str) -> None:
    if is_used:
        raise invalid(f"'{param}' is not supported by this model.", param, "unsupported_parameter")


def _refuse_unsupported_chat(request: ChatRequest) -> None:
    _refuse(bool(request.functions), "functions")
    _refuse(request.function_call not in (None, "none", "auto"), "function_call")
    _refuse(request.audio is not None, "audio")
    _refuse(request.modalities not in (None, [], ["text"]), "modalities")


def _refuse_unsupported_text(request: CompletionRequest) -> None:
    _refuse(bool(request.suffix), "suffix")
