"""From a request's fields to SamplingParams: every token id is checked against the vocabulary here."""

from collections.abc import Sequence

from engine.wire import SamplingParams
from gateway.errors import invalid
from gateway.models import TextSide
from gateway.schemas import Common

_LEAST_TOP_P = 1e-6  # top_p 0 means the best token alone; the engine takes what is above 0
_INT63 = 1 << 63


def sampling_params(
    request: Common, text: TextSide, max_tokens: int, *, logprobs: int, prompt_logprobs: int, grammar: str
) -> SamplingParams:
    """Defaults filled in, ids checked. Raises ApiError 400 that names the field."""
    if (request.min_tokens or 0) > max_tokens:
        raise invalid("'min_tokens' may not be larger than the number of tokens to produce.", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=max(_or(request.top_p, 1.0), _LEAST_TOP_P),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, text),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=None if request.seed is None else request.seed % _INT63,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(check_ids(request.stop_token_ids or (), text, "stop_token_ids")),
        grammar=grammar,
    )


def check_ids(ids: Sequence[int], text: TextSide, param: str) -> list[int]:
    """The ids, all of them in the vocabulary. Raises ApiError 400."""
    vocab_size = text.card.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(f"Token ids of '{param}' must lie between 0 and {vocab_size - 1}.", param)
    return list(ids)


def _logit_bias(bias: dict[str, float], text: TextSide) -> dict[int, float]:
    try:
        ids = {int(key): value for key, value in bias.items() if key.isascii() and key.isdigit()}
    except ValueError:  # more digits than an int may be parsed from
        ids = {}
    if len(ids) != len(bias):
        raise invalid("Keys of 'logit_bias' must be token ids.", "logit_bias")
    check_ids(list(ids), text, "logit_bias")
    return ids


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
