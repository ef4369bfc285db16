"""The child of adapter_check.py: the only place of the gateway that parses adapters (and imports numpy)."""

import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from gateway.adapter_check import Checked, Job, Verdict
from tenants.adapter_shape import AdapterShape, ExpertShape
from tenants.adapters import InvalidAdapter, canonicalise


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    try:
        adapter = canonicalise(job.config, Path(job.weights), Path(job.out), _shape(job), job)
        verdict = Verdict(msgspec.convert(asdict(adapter), Checked), [])
    except InvalidAdapter as error:
        verdict = Verdict(None, error.reasons)
    sys.stdout.buffer.write(msgspec.msgpack.encode(verdict))


def _shape(job: Job) -> AdapterShape:
    card = job.experts
    experts = card and ExpertShape(card.num_experts, card.hidden_size, card.width, card.layers, card.takes_adapters)
    return AdapterShape(job.modules, job.num_layers, job.max_lora_rank, frozenset(job.served_models), experts)


if __name__ == "__main__":
    main()
