"""From a Submit to the sequences of a request, or the reason why not."""

from collections.abc import Callable
from typing import Protocol

from engine import wire
from engine.config import EngineConfig
from engine.errors import InvalidRequest, TooLong
from engine.sequence import Matcher, Request, Sequence, choice_seed


class ModelInfo(Protocol):
    """What the engine has to know of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Grammar(Protocol):
    """What the choices of a request are held to: ``engine.grammar.Grammar``."""

    def matcher(self) -> Matcher: ...


def read_prompts(submit: wire.Submit, config: EngineConfig, model: ModelInfo) -> list[list[int]]:
    """The prompts as ids. Raises InvalidRequest, or TooLong for what could never be computed: each prompt and one
    output token must fit the context and the block pool, all choices together the queue."""
    sampling = submit.sampling
    if submit.num_choices < 1 or not submit.prompts or sampling.max_tokens < 0:
        raise InvalidRequest("a request needs a prompt, a choice and no negative max_tokens")
    if submit.adapter_key and config.adapter_slots == 0:
        raise InvalidRequest("this engine has no adapter slots")
    for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if any(not 0 <= token < model.vocab_size for token in tokens):  # an index into the logits: the step would break
            raise InvalidRequest(f"{name} names a token that the model doesn't have")
    prompts = [_prompt_ids(prompt, model.vocab_size) for prompt in submit.prompts]
    room = min(config.context_tokens, config.pool_tokens) - (sampling.max_tokens > 0)
    longest = max(map(len, prompts))
    if longest > room:
        raise TooLong(f"a prompt of {longest} tokens, {room} fit")
    num_tokens = submit.num_choices * sum(map(len, prompts))
    if num_tokens > config.max_waiting_tokens:
        raise TooLong(f"{num_tokens} tokens in all, {config.max_waiting_tokens} fit into the queue")
    return prompts


def make_sequences(
    request: Request, prompts: list[list[int]], first_id: int, draw_seed: Callable[[], int]
) -> list[Sequence]:
    """One sequence a choice, prompt by prompt, ids from ``first_id`` on. A request without a seed gets one drawn for
    each choice; with one, choice i of every prompt has the same derived seed."""
    seed, num_choices = request.submit.sampling.seed, request.submit.num_choices
    sequences = []
    for index, prompt in enumerate(prompts):
        for i in range(num_choices):
            choice = index * num_choices + i
            own_seed = draw_seed() if seed is None else choice_seed(seed, i)
            sequences.append(Sequence(first_id + choice, request, choice, list(prompt), own_seed))
    return sequences


def _prompt_ids(prompt: bytes, vocab_size: int) -> list[int]:
    if not prompt or len(prompt) % 4:
        raise InvalidRequest("a prompt is empty or no list of int32 ids")
    ids = wire.unpack_ids(prompt)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest("a prompt has a token id that the model doesn't have")
    return ids
