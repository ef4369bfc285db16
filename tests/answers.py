"""Greedy answers of the real engine with the logits behind every token, to hold against another implementation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.flight import StepHandle
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.scheduler import StepPlan
from engine.weights.adapter import AdapterWeights
from engine.wire import Flow, SamplingParams, Submit, pack_ids, unpack_ids
from tests.families import HfModel


class RecordingRunner(Runner):
    """The engine's runner; keeps the logits that each token of each request was drawn from."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.logits: dict[str, list[Tensor]] = {}
        self.most_at_once = 0
        self._step: list[Tensor] = []
        plain = model.logits

        def recorded(hidden: Tensor) -> Tensor:
            self._step.append(plain(hidden))
            return self._step[-1]

        model.logits = recorded  # what the runner gets, as it gets it

    def launch(self, plan: StepPlan) -> StepHandle:
        self._step.clear()
        handle = super().launch(plan)
        drawn = [chunk for chunk in plan.chunks if chunk.samples]
        for chunk, row in zip(drawn, self._step[0] if drawn else (), strict=True):
            self.logits.setdefault(chunk.sequence.request.request_id, []).append(row.clone())
        self.most_at_once = max(self.most_at_once, len(plan.chunks))
        return handle


@dataclass(frozen=True)
class Answer:
    """``logits`` [tokens, V] are those that the tokens were drawn from."""

    adapter: str
    prompt: list[int]
    tokens: list[int]
    logits: Tensor


def greedy_answers(
    model: Decoder,
    adapters: Mapping[str, AdapterWeights],
    prompts: Sequence[tuple[str, list[int]]],
    sizes: EngineConfig,
    num_tokens: int,
) -> list[Answer]:
    """(adapter, prompt) each, all of them at once in mixed batches."""
    runner = RecordingRunner(model, sizes)
    engine = Engine(sizes, runner)
    for key, adapter in adapters.items():
        engine.adapter_ready(key, adapter)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for number, (adapter, prompt) in enumerate(prompts):
        space = b"n" + adapter.encode()
        tokens[f"r{number}"] = []
        engine.add(
            Submit(f"r{number}", [pack_ids(prompt)], sampling, Flow("f"), space, num_tokens, adapter_key=adapter)
        )
    while engine.has_work:
        result = engine.step()
        assert not result.wanted, result.wanted
        for delta in result.deltas:
            tokens[delta.request_id] += unpack_ids(delta.token_ids)
    assert runner.most_at_once == len(prompts)
    return [
        Answer(adapter, prompt, tokens[name], torch.stack(runner.logits[name]))
        for name, (adapter, prompt) in zip(tokens, prompts, strict=True)
    ]


def expected_logits(oracle: HfModel, answer: Answer) -> Tensor:
    """What the oracle says before each token of the answer, [tokens, V]."""
    return oracle.logits(answer.prompt + answer.tokens[:-1], answer.adapter)[len(answer.prompt) - 1 :]
