"""Sixty schemas on the real model: what is drawn is of the mask, most answers are whole, all whole ones validate."""

import json
from collections import Counter
from datetime import datetime

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from engine import wire
from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar import Compiler, Matcher, is_allowed
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.weights import LoadedModel, load_model
from gateway.schemas import JsonSchema, ResponseFormat
from gateway.text.grammar import form_of_text
from ops.default_model import DEFAULT_GGUF
from tests.schemas import SCHEMAS

pytestmark = pytest.mark.long

MAX_TOKENS = 512
CHAT = "<|im_start|>user\nDescribe {} as short JSON.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    if not DEFAULT_GGUF.is_file():
        pytest.fail(f"{DEFAULT_GGUF.name} is missing: ./run setup fetches it")
    return load_model(DEFAULT_GGUF, torch.float32)


class Answer:
    """What one schema came to: text, finish reason, and how many drawn tokens were held against their masks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.reason = ""


@pytest.fixture(scope="module")
def checked() -> Counter[str]:
    return Counter()


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel, checked: Counter[str]) -> dict[str, Answer]:
    """All schemas at once, each token held against the mask of its own step."""
    patch = pytest.MonkeyPatch()
    plain = Matcher.advance

    def advance(matcher: Matcher, token_id: int) -> None:
        checked["in mask" if is_allowed(matcher.mask(), token_id) else "outside"] += 1
        plain(matcher, token_id)

    patch.setattr(Matcher, "advance", advance)
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    compiler = Compiler(loaded.tokenizer.tokenizer_json, loaded.config.vocab_size, loaded.config.eos_token_ids)
    sizes = EngineConfig(num_blocks=3000, context_tokens=1024, max_step_tokens=512, max_running=64)
    engine = Engine(sizes, Runner(Decoder(loaded.config, loaded.weights), sizes))
    outcome: dict[str, Answer] = {}
    for name, schema in SCHEMAS.items():
        grammar = form_of_text(ResponseFormat("json_schema", JsonSchema(schema, "s", strict=True))).grammar
        sampling = wire.SamplingParams(MAX_TOKENS, temperature=0.7, top_p=0.95, seed=1, grammar=grammar)
        prompt = wire.pack_ids(tokenizer.encode(CHAT.format(name)).ids)
        engine.add(wire.Submit(name, [prompt], sampling, wire.Flow("f"), b"n", MAX_TOKENS), compiler.compile(grammar))
        outcome[name] = Answer()
    while engine.has_work:
        for delta in engine.step().deltas:
            ids = wire.unpack_ids(delta.token_ids)
            outcome[delta.request_id].ids += [i for i in ids if i != delta.stop_token_id]
            checked["drawn"] += len(ids)
            outcome[delta.request_id].reason = delta.finish_reason
    patch.undo()
    assert not compiler.num_cut, compiler.num_cut
    print(f"{compiler.num_masks} masks, {compiler.mask_ns / compiler.num_masks / 1e3:.0f} µs of processor time each")
    return outcome


def test_there_are_sixty_schemas_and_all_of_them_compile(answers: dict[str, Answer]):
    assert len(SCHEMAS) == 60
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert answers.keys() == SCHEMAS.keys()


def test_every_drawn_token_is_of_its_steps_mask(answers: dict[str, Answer], checked: Counter[str]):
    print(dict(checked))
    assert checked["outside"] == 0
    assert checked["in mask"] == checked["drawn"] > 600


def test_at_least_fifty_are_whole_within_512_tokens_and_every_whole_one_validates(
    answers: dict[str, Answer], loaded: LoadedModel
):
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    formats = jsonschema.FormatChecker(("date", "ipv4", "uuid", "email"))
    formats.checks("time", ValueError)(lambda text: bool(datetime.fromisoformat(f"2026-01-01T{text}").tzinfo))
    formats.checks("date-time", ValueError)(lambda text: bool(datetime.fromisoformat(text).tzinfo))
    whole = {name: answer for name, answer in answers.items() if answer.reason == "stop"}

    for name, answer in whole.items():
        text = tokenizer.decode(answer.ids)
        jsonschema.validate(json.loads(text), SCHEMAS[name], jsonschema.Draft202012Validator, format_checker=formats)
        print(f"{name}: {text}")
    print(f"{len(whole)} of {len(answers)} whole; cut: {sorted(answers.keys() - whole.keys())}")

    assert len(whole) >= 50
