"""The child of adapter_check.py: the only place of the gateway that parses adapters (and imports numpy)."""

import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from gateway.adapter_check import Checked, Job, Verdict
from tenants.adapters import AdapterShape, InvalidAdapter, canonicalise


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    shape = AdapterShape(job.modules, job.num_layers, job.max_lora_rank, frozenset(job.served_models))
    try:
        adapter = canonicalise(job.config, Path(job.weights), Path(job.out), shape, job)
        verdict = Verdict(msgspec.convert(asdict(adapter), Checked), [])
    except InvalidAdapter as error:
        verdict = Verdict(None, error.reasons)
    sys.stdout.buffer.write(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()
