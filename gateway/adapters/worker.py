"""The child of check.py: the only place of the gateway that parses adapters (and imports numpy)."""

import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from gateway.adapters.check import NO_ROOM, AnyJob, Checked, HeaderJob, Job, Verdict
from tenants.adapters.gate import InvalidAdapter, canonicalise
from tenants.adapters.header import BadHeader, read_header
from tenants.adapters.shape import AdapterShape, ExpertShape


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AnyJob)
    try:
        verdict = _header_verdict(job) if isinstance(job, HeaderJob) else _adapter_verdict(job)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        verdict = Verdict(None, [], no_room=True)
    sys.stdout.buffer.write(msgspec.msgpack.encode(verdict))


def _adapter_verdict(job: Job) -> Verdict:
    try:
        adapter = canonicalise(job.config, Path(job.weights), Path(job.out), _shape(job), job)
    except InvalidAdapter as error:
        return Verdict(None, error.reasons)
    return Verdict(msgspec.convert(asdict(adapter), Checked), [])


def _header_verdict(job: HeaderJob) -> Verdict:
    max_tensors = max(_shape(base).max_tensors for base in job.bases)
    try:
        with Path(job.weights).open("rb") as file:
            read_header(file, job.file_bytes, max_tensors)
    except BadHeader as error:
        return Verdict(None, error.reasons)
    return Verdict(None, [])


def _shape(job: Job) -> AdapterShape:
    card = job.experts
    experts = card and ExpertShape(
        card.num_experts, card.hidden_size, card.width, card.layers, card.takes_adapters, card.max_lora_rank
    )
    return AdapterShape(job.modules, job.num_layers, job.max_lora_rank, frozenset(job.served_models), experts)


if __name__ == "__main__":
    main()
