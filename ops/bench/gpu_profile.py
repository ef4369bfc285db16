"""Where the time of an engine's steps goes: kernels by the profiler, the host's functions."""

import time
from pathlib import Path

from ops.bench.loaded_engine import Bench


def profile(
    bench: Bench, names: list[str], out: Path, label: str, num: int = 32, prompt_tokens: int = 64, num_before: int = 12
) -> dict:
    """Kernels of four steps after ``num_before``: seconds by kernel, and the list of one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    bench.fill(num, prompt_tokens, 24, names)
    for _ in range(num_before):
        bench.engine.step()
    bench.sync()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if bench.device.type == "cuda" else [])
    begin = time.perf_counter()
    with profiler(activities=kinds) as seen:
        for _ in range(4):
            bench.engine.step()
        bench.sync()
    wall_ms = (time.perf_counter() - begin) * 1e3 / 4
    bench.drain()
    events = [event for event in seen.events() or [] if "CUDA" in str(event.device_type)]
    totals: dict[str, list[float]] = {}
    for event in events:
        entry = totals.setdefault(event.name, [0.0, 0])
        entry[0] += event.time_range.elapsed_us() / 4
        entry[1] += 1 / 4
    rows = sorted(((us, count, name) for name, (us, count) in totals.items()), reverse=True)
    lines = [f"{us:9.1f} us {count:7.1f} x  {name[:110]}" for us, count, name in rows]
    (out / f"profile_{bench.shape}_{label}.txt").write_text("\n".join(lines) + "\n\n" + launches(events))
    print(f"-- {label}: one step of four, {num} sequences, profiled wall {wall_ms:.2f} ms")
    print("\n".join(lines[:22]))
    busy = sum(us for us, _, _ in rows) / 1e3
    return {"profiled_wall_ms": wall_ms, "gpu_busy_ms": busy, "launches": sum(count for _, count, _ in rows)}


def launches(events: list) -> str:
    """The kernels of the last of four steps in order, runs of one kernel in one line."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    ordered = ordered[len(ordered) * 3 // 4 :]
    return "\n".join(f"{event.time_range.elapsed_us():8.1f} {event.name[:100]}" for event in ordered[:600])


def prefill_profile(bench: Bench, names: list[str], out: Path, label: str, num: int, prompt_tokens: int) -> dict:
    """Kernels of four steps that compute prompts, and of four in which all decode."""
    first = profile(bench, names, out, f"{label}_prompts", num, prompt_tokens, 2)
    return {"prompts": first, "decodes": profile(bench, names, out, f"{label}_decodes", num, prompt_tokens, 21)}


def host_times(bench: Bench, names: list[str]) -> dict:
    """Host milliseconds of a decode step by part, 32 sequences."""
    import cProfile
    import pstats

    bench.fill(32, 64, 64, names)
    for _ in range(8):
        bench.engine.step()
    watch = cProfile.Profile()
    begin = time.perf_counter()
    watch.enable()
    for _ in range(40):
        bench.engine.step()
    watch.disable()
    wall = (time.perf_counter() - begin) / 40 * 1e3
    bench.drain()
    stats = pstats.Stats(watch)
    calls_of = stats.stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = sorted(((value[3], value[2], value[0], key) for key, value in calls_of.items()), reverse=True)[:40]
    for cumulative, own, calls, key in rows:
        name = f"{Path(key[0]).name}:{key[2]}"
        print(f"{cumulative / 40 * 1e3:8.3f} ms {own / 40 * 1e3:8.3f} own {calls / 40:8.1f} x {name}")
    return {"wall_ms": wall}
