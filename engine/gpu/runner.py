"""The runner of a GPU: launches steps and leaves; the next one is launched before the last has told its tokens."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Rows, flatten, on_device, to_batch
from engine.config import EngineConfig
from engine.gpu.decode_graphs import DecodeGraphs, graph_kinds, resolve
from engine.gpu.piece_graphs import PieceGraphs
from engine.gpu.plain_torch import warn_of, without_kernel
from engine.gpu.rehearsal import rehearse
from engine.gpu.sampler import DeviceSampler, Scores, score, to_host
from engine.gpu.shapes import shapes_of
from engine.gpu.shared_prefixes import SharedPrefixes
from engine.metering.cost import Floats
from engine.models.decoder import Decoder
from engine.runner import SCORE_ROWS, Runner, scored_tokens
from engine.scheduler import Chunk, ChunkResult, StepPlan
from kernels.paged_attention import PrefixGroup
from kernels.sampling import highest


@dataclass(frozen=True)
class DeviceStep:
    """A launched step. ``tokens`` of the sampling chunks, in order, the scores (by the chunk's number) and the chunks'
    parts of the experts are in pinned memory once ``done``."""

    plan: StepPlan
    tokens: Tensor
    logprobs: dict[int, Scores]
    scores: dict[int, list[Scores]]
    parts_of_experts: Tensor | None
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def results(self) -> list[ChunkResult]:
        self.done.synchronize()
        tokens = iter(self.tokens.tolist())
        return [
            ChunkResult(
                next(tokens) if chunk.samples else -1,
                self.logprobs[index].read()[0] if index in self.logprobs else None,
                tuple(one for part in self.scores.get(index, ()) for one in part.read()),
            )
            for index, chunk in enumerate(self.plan.chunks)
        ]

    def expert_parts(self) -> Floats | None:
        return None if self.parts_of_experts is None else self.parts_of_experts.numpy()


class CudaRunner(Runner):
    """Decodes that a graph holds are replayed, all else is launched kernel by kernel. Everything goes to one stream, in
    the order of the calls. ``has_graphs`` False: everything kernel by kernel. A deterministic engine's steps are all of
    one shape (``config`` as ``in_one_shape`` gives it)."""

    overlaps = True

    def __init__(self, model: Decoder, config: EngineConfig, *, has_graphs: bool = True) -> None:
        device = model.embedding.device
        super().__init__(model, config, peak_bytes_s(device))
        self._config = config
        self._counters = self.device_counters
        self._without_kernel = without_kernel(model.config, model.embedding.dtype)
        warn_of(self._without_kernel)
        self._device_sampler = DeviceSampler(model.config.eos_token_ids, device)
        self._shapes = shapes = shapes_of(config)
        assert not shapes.is_fixed or config.max_step_tokens <= shapes.tokens[-1], (config, shapes)
        model.keep_choices(max((config.max_step_tokens, *shapes.decodes, *shapes.tokens)))
        most = max((config.max_sequences, *shapes.decodes))
        self._drawn = torch.zeros(most, dtype=torch.int64, device=device)
        self._ahead: Rows = {}  # row of each sequence among the tokens that the last step draws
        self._prefixes = SharedPrefixes(model.config, config, self._token_bytes // model.config.num_layers)
        self._decodes: DecodeGraphs | None = None
        self._prompts: PieceGraphs | None = None
        if has_graphs and not self._without_kernel:
            shared = model, self.kv, self.slots, self._drawn, config, torch.cuda.graph_pool_handle()
            self._decodes = DecodeGraphs(*shared) if graph_kinds(model.config, config) else None
            self._prompts = PieceGraphs(*shared)

    def rehearse(self) -> None:
        """Launches everything that a step can, for who compiles it; nothing that lacks a kernel."""
        if not self._without_kernel:
            rehearse(self._model, self.kv, self.slots, self._config)

    @torch.inference_mode()
    def warm(self) -> None:
        """Launches what graphs will hold, and moves an adapter; before ``capture``."""
        if self.slots.num_slots:
            self.slots.rehearse()
        for graphs in self._graphs:
            graphs.launch()

    @torch.inference_mode()
    def capture(self) -> None:
        """The graphs; before the first step."""
        for graphs in self._graphs:
            graphs.capture()

    @property
    def _graphs(self) -> list[PieceGraphs | DecodeGraphs]:
        return [graphs for graphs in (self._prompts, self._decodes) if graphs is not None]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Returns while the device computes."""
        for reason in self._without_kernel:
            self._counters.fallbacks["kernel", reason] += 1
        with self._clock.step():
            return self._start(plan)

    def _start(self, plan: StepPlan) -> DeviceStep:
        rows = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self._counters.num_bytes += self._least_bytes(plan)
        scores: dict[int, list[Scores]] = {}
        groups = self._prefixes.groups(plan)
        self._counters.num_bytes -= sum(group.num_spared for group in groups) * self._token_bytes
        self._counters.num_grouped += sum(len(group.members) for group in groups)
        if self._decodes is not None and self._decodes.fits(plan):
            logits = self._decodes.replay(plan, self._ahead, groups)
            self._counters.shapes[f"decode {self._decodes.size(len(rows))}"] += 1
        else:
            logits, scores = self._launch_prompts(plan, groups)
        if self._device_sampler.changes(rows):
            self._drawn[: len(rows)].copy_(self._device_sampler.sample(logits, rows))
        self._ahead = {sequence.seq_id: row for row, sequence in enumerate(rows)}
        drawn = self._drawn[: len(rows)]
        parts = self._expert_parts(plan)
        parts = None if parts is None else to_host(parts)
        step = DeviceStep(plan, to_host(drawn), self._logprobs(plan, logits, drawn), scores, parts)
        step.done.record()
        return step

    def _launch_prompts(
        self, plan: StepPlan, groups: tuple[PrefixGroup, ...]
    ) -> tuple[Tensor, dict[int, list[Scores]]]:
        """→ logits of the chunks that sample, whose highest ids are in ``drawn`` then, and the prompts' scores."""
        flat = flatten(plan, self._block_size, self._ahead, groups)
        starts = flat.starts.tolist()
        if self._prompts is not None and self._prompts.fits(plan.num_tokens):
            hidden = self._prompts.replay(flat)
            self._counters.shapes[f"tokens {self._prompts.size(plan.num_tokens)}"] += 1
        else:
            self._count_by_hand(plan)
            batch = to_batch(flat, self._block_size, self._model.config.attention, self._drawn.device)
            hidden = self._model.forward(resolve(batch, self._drawn), self.kv, self.slots)
        (rows,) = on_device(self._drawn.device, flat.logits_rows)
        logits = self._logits(hidden.index_select(0, rows))
        highest(logits, self._drawn[: len(logits)])
        scores = {
            index: self._scores(chunk, hidden[starts[index] : starts[index + 1]])
            for index, chunk in enumerate(plan.chunks)
            if chunk.scores
        }
        return logits, scores

    def _count_by_hand(self, plan: StepPlan) -> None:
        """A step that is launched kernel by kernel; a fallback where a graph could have been expected."""
        self._counters.shapes["by hand"] += 1
        decodes = ("too_many_sequences",) if plan.num_tokens == len(plan.chunks) else ()
        for reason in self._without_kernel or decodes:
            self._counters.fallbacks["graph", reason] += 1

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → logits [R, V], by a product of the shape that there is."""
        missing = self._shapes.head_rows - len(hidden)
        filled = F.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden
        return self._model.product_with_head(filled)[: len(hidden)]

    def _scores(self, chunk: Chunk, hidden: Tensor) -> list[Scores]:
        targets = scored_tokens(chunk)
        num_top = chunk.sequence.sampling.prompt_logprobs
        on_device = torch.tensor(targets).pin_memory().to(hidden.device, non_blocking=True)
        return [
            score(self._logits(hidden[first : first + len(some)]), some, num_top)
            for first, some in zip(range(0, len(targets), SCORE_ROWS), on_device.split(SCORE_ROWS), strict=True)
        ]

    def _logprobs(self, plan: StepPlan, logits: Tensor, drawn: Tensor) -> dict[int, Scores]:
        """Of the tokens drawn, by chunk, for who wants them."""
        sampling = [(index, chunk.sequence) for index, chunk in enumerate(plan.chunks) if chunk.samples]
        return {
            index: score(logits[row : row + 1], drawn[row : row + 1], sequence.sampling.logprobs)
            for row, (index, sequence) in enumerate(sampling)
            if sequence.sampling.logprobs >= 0
        }


def peak_bytes_s(device: torch.device) -> float:
    """Of the device's memory, by its clock and the width of its bus: two transfers a cycle."""
    properties = torch.cuda.get_device_properties(device)
    return 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
