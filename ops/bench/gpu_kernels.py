"""The Triton kernels on one GPU: first whether they are right, then how fast, beside floors, peers and what we want.

    python3 -m ops.bench.gpu_kernels [--out FOLDER] [--checks NAMES] [--match CASES] [--no-variants]
        [--only checks,ceilings,decode,prefill,lora,lora_step,norm,quantised,moe,shapes]

Needs torch with CUDA and triton, nothing else of the project. Checks, and a first run of every launch that is timed
later, go in processes beside each other (Triton's compiler takes one core each); the timing then has the GPU alone.
FOLDER/gpu_kernels.json holds every row. Ends with 1 if a check failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

SECTIONS = ("decode", "prefill", "lora", "lora_step", "norm", "quantised", "moe", "shapes")
MOST_PROCESSES = 14
TIMED_S = {
    "decode": 110,
    "prefill": 40,
    "lora": 110,
    "lora_step": 110,
    "norm": 25,
    "quantised": 140,
    "moe": 90,
    "shapes": 60,
}  # at most; what is left out is said

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "tenora_triton_cache"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default="checks,ceilings," + ",".join(SECTIONS))
    parser.add_argument("--checks", default="", help="only those whose names begin so, by commas")
    parser.add_argument("--match", default="", help="only the cases whose names this regular expression finds")
    parser.add_argument("--no-variants", action="store_true")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        return run_check(options.check)
    if options.warm:
        return warm(*options.warm.split(":"), match=options.match, variants_too=not options.no_variants)
    chosen = options.only.split(",")
    began = time.monotonic()
    report: dict[str, Any] = {"meta": machine(), "command": sys.argv, "checks": {}, "rows": []}
    print(json.dumps(report["meta"]), flush=True)
    report["checks"] = beside_each_other(chosen, options)
    print(f"== checked and compiled in {time.monotonic() - began:.0f} s", flush=True)
    if "ceilings" in chosen:
        report["ceilings"] = ceilings()
    for section in SECTIONS:
        if section in chosen:
            report["rows"] += time_section(section, options.match, with_variants=not options.no_variants)
            save(options.out, report)
    print_tables(report)
    print(f"== {time.monotonic() - began:.0f} s in all", flush=True)
    save(options.out, report)
    return int(any(outcome != "ok" for outcome in report["checks"].values()))


def machine() -> dict[str, str]:
    import torch
    import triton

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def save(folder: Path, report: dict[str, Any]) -> None:
    (folder / "gpu_kernels.json").write_text(json.dumps(report, indent=0))


def beside_each_other(chosen: list[str], options: argparse.Namespace) -> dict[str, str]:
    """Every check and the warming of every section, as processes; what each check said."""
    jobs: list[tuple[str, list[str]]] = []
    if "checks" in chosen:
        jobs += [
            (name, ["--check", name]) for name in all_checks() if name.startswith(tuple(options.checks.split(",")))
        ]
    parts = {"decode": 2, "prefill": 1, "lora": 4, "lora_step": 3, "norm": 1, "quantised": 8, "moe": 4, "shapes": 4}
    for section in set(SECTIONS) & set(chosen):
        for part in range(parts[section]):
            flags = ["--match", options.match, *(["--no-variants"] if options.no_variants else [])]
            jobs.append((f"warm {section} {part}", ["--warm", f"{section}:{part}:{parts[section]}", *flags]))
    waiting, running, said = list(jobs), {}, {}
    while waiting or running:
        while waiting and len(running) < MOST_PROCESSES:
            name, arguments = waiting.pop(0)
            command = [sys.executable, "-m", "ops.bench.gpu_kernels", *arguments]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, process in list(running.items()):
            try:
                said[name] = process.communicate(timeout=0.05)[0]
            except subprocess.TimeoutExpired:
                continue
            del running[name]
            outcome = "ok" if process.returncode == 0 else f"FAILED ({process.returncode})"
            print(f"check  {name}: {outcome} {said[name].strip()[-1500 if process.returncode else -60 :]}", flush=True)
            said[name] = "ok" if process.returncode == 0 else said[name][-3000:]
    return {name: text for name, text in said.items() if not name.startswith("warm")}


def all_checks() -> dict[str, Callable[[], None]]:
    from ops.bench.gpu import (
        cases_quantised,
        checks,
        checks_captured,
        checks_lora,
        checks_lora_way,
        checks_moe,
        checks_moe_lora,
        checks_small,
    )

    of_experts = checks_moe, checks_moe_lora
    parts = (checks, checks_captured, checks_lora, checks_lora_way, cases_quantised, *of_experts, checks_small)
    return {name: check for part in parts for name, check in part.CHECKS.items()}


def run_check(name: str) -> int:
    import torch

    from ops.bench.gpu.checks import fresh_memory_is_nan

    torch.manual_seed(0)
    began = time.monotonic()
    with fresh_memory_is_nan():
        all_checks()[name]()
    torch.cuda.synchronize()
    print(f"{time.monotonic() - began:.0f} s, at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    return 0


def warm(section: str, part: str, parts: str, *, match: str, variants_too: bool) -> int:
    """Runs every launch of a part of a section once, so that it is compiled when it is timed."""
    import torch

    from ops.bench.gpu.cases import Pool

    Pool.num_blocks = 40_000  # the memory is shared by all processes
    failed = 0
    for label, change, case in jobs_of(section, match, variants_too)[int(part) :: int(parts)]:
        try:
            with change():
                case.build().calls[0]()
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            print(f"{case.name} {label}: {type(error).__name__} {str(error)[:200]}")
        torch.cuda.empty_cache()
    return int(failed > 0)


Change = Callable[[], AbstractContextManager[None]]


def jobs_of(section: str, match: str, variants_too: bool) -> list[tuple[str, Change, Any]]:
    from ops.bench.gpu.cases import cases
    from ops.bench.gpu.cases_captured import captured_cases, sampling_cases
    from ops.bench.gpu.cases_lora import lora_step_cases
    from ops.bench.gpu.cases_lora_way import lora_way_cases
    from ops.bench.gpu.cases_moe import moe_cases
    from ops.bench.gpu.cases_quantised import quantised_cases
    from ops.bench.gpu.cases_shapes import shape_cases
    from ops.bench.gpu.changes import other_rows
    from ops.bench.gpu.variants import variants

    kinds = (
        cases, captured_cases, sampling_cases, lora_step_cases, lora_way_cases, quantised_cases, moe_cases, shape_cases,
    )  # fmt: skip
    found = [case for kind in kinds for case in kind() if re.search(match, case.name)]
    own = {case.name: case for case in found if case.section == section}
    jobs: list[tuple[str, Change, Any]] = [("", nullcontext, case) for case in own.values()]
    if not variants_too:
        return jobs
    for label, rows, names in variants()[section]:
        jobs += [(label, partial(other_rows, rows), own[name]) for name in names if name in own]
    return jobs


def time_section(section: str, match: str, *, with_variants: bool) -> list[dict[str, Any]]:
    import torch

    from ops.bench.gpu.timing import median_us

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + TIMED_S[section]
    left_out = 0
    for label, change, case in jobs_of(section, match, with_variants):
        if time.monotonic() > ends:
            left_out += 1
            continue
        row = {"section": section, "case": case.name, "variant": label, "floor_us": case.floor_us}
        row |= {
            "predicted_us": case.predicted_us,
            "peer_us": case.peer_us,
            "must_us": case.must_us,
            "goal_us": case.goal_us,
        }
        try:
            with change():
                built = case.build()
                row["error"] = built.verify()
                row["us"] = median_us(built.calls, 25 if not label else 15)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.append(row)
        built = None
        torch.cuda.empty_cache()
    if left_out:
        print(f"== {section}: {left_out} rows left out for time", flush=True)
    return rows


def ceilings() -> dict[str, float]:
    """TB/s of a copy (both ways), TFLOP/s of cuBLAS, µs of skinny products."""
    import torch

    from ops.bench.gpu.timing import median_us

    large = torch.empty(1 << 30, device="cuda").normal_()
    target = torch.empty_like(large)
    took = median_us([lambda x=large, y=target: y.copy_(x)], 9)
    found = {"copy TB/s": 8 * large.numel() / took / 1e6}
    del large, target
    draw = lambda *shape: torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()  # noqa: E731
    pairs = [(draw(8192, 8192), draw(8192, 8192)) for _ in range(3)]
    took = median_us([lambda x=x, w=w: x @ w for x, w in pairs], 9)
    found["matmul TFLOP/s"] = 2 * 8192**3 / took / 1e6
    for name, size_in, size_out in (("o 4096x4096", 4096, 4096), ("qkv 4096x6144", 4096, 6144)):
        sets = [(draw(64, size_in), draw(size_out, size_in)) for _ in range(6)]
        calls = [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in sets]
        found[f"cuBLAS M=64 {name} us"] = median_us(calls)
    return found


def print_tables(report: dict[str, Any]) -> None:
    """Short: only the end of the output comes back from some machines."""
    print("\n".join(f"{name}: {value:.2f}" for name, value in report.get("ceilings", {}).items()))
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        if row.get("error", 1.0) < 1e-2 and "us" in row:
            key = (row["section"], row["case"])
            best[key] = min(best.get(key, row), row, key=lambda one: one["us"])
    print(f"{'case':<38}{'us':>8}{'pred':>8}{'floor':>8}{'frac':>6}{'peer':>8}{'must':>8}{'goal':>8}        best")
    for row in report["rows"]:
        if row["variant"]:
            continue
        name = f"{row['section']} {row['case']}"
        if "us" not in row or row["error"] >= 1e-2:
            print(f"{name:<38} FAILED {row.get('failed', row.get('error'))}"[:200])
            continue
        top = best[row["section"], row["case"]]
        must, goal = row["must_us"], row["goal_us"]
        verdict = "" if must is None else "goal" if row["us"] <= goal else "must" if row["us"] <= must else "-"
        figures = "".join(f"{row[key]:8.1f}" if row[key] else " " * 8 for key in ("peer_us", "must_us", "goal_us"))
        floor = row["floor_us"]
        print(
            f"{name:<38}{row['us']:8.2f}{row['predicted_us']:8.1f}{floor:8.1f}{floor / row['us']:6.2f}"
            f"{figures} {verdict:<5} {top['us']:7.2f} {top['variant'] or 'table'}"
        )
    failed = [row for row in report["rows"] if row["variant"] and ("us" not in row or row["error"] >= 1e-2)]
    for row in failed[:12]:
        print(f"variant {row['case']} {row['variant']}: {row.get('failed', row.get('error'))}"[:160])
    bad = [name for name, outcome in report["checks"].items() if outcome != "ok"]
    print(f"checks: {len(report['checks']) - len(bad)} of {len(report['checks'])} ok; failed: {bad}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
