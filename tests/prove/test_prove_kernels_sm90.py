"""Every launch of the Triton kernels, compiled for sm_90 by the Triton of the H200 machines; needs no GPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/kernels/golden_sm90.json"
TRITON = "triton==3.6.0"  # its ptxas decides what we measure; not the version that the project runs with on a CPU
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tenora"
MAX_SHARED_BYTES = 227 * 1024  # of a block on sm_90
EIGHT_WARPS = {"num_warps": 8, "num_stages": 4}
LOOSE = 1.1  # of registers and of narrow loads: more than this over the golden file is a change to look at


@pytest.fixture(scope="module")
def triton_folder() -> Path:
    """The wheel, fetched once and unpacked into a folder of its own."""
    folder = CACHE / f"{TRITON}-cp{sys.version_info.major}{sys.version_info.minor}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, TRITON]
        fetched = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(work).glob("*.whl"))
        if not wheels:
            pytest.skip(f"{TRITON} cannot be fetched: {fetched.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(work) / "site")
        for tool in (Path(work) / "site/triton/backends/nvidia/bin").iterdir():
            tool.chmod(0o755)  # zipfile forgets it
        os.replace(Path(work) / "site", folder)
    return folder


def compiled(triton_folder: Path, tmp_path: Path, *arguments: str, folder: Path = ROOT) -> dict[str, dict[str, int]]:
    """``folder``: where ``kernels`` is looked for first."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{triton_folder}{os.pathsep}{ROOT}",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-m", "tests.kernels.compiled.gate", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def problems(launch: str, now: dict[str, int], before: dict[str, int]) -> list[str]:
    """What is wrong with a launch, against the golden file."""
    forbidden = ("atomics", "overwritten", *(() if "fp32" in launch else ("stack", "spills")))  # fp32: for comparisons
    found = [f"{launch}: {name} {now[name]}" for name in forbidden if now[name]]
    if now["shared_bytes"] > MAX_SHARED_BYTES:
        found.append(f"{launch}: {now['shared_bytes']} bytes of shared memory, it cannot start")
    for name in ("registers", "narrow_loads"):
        if now[name] > before[name] * LOOSE:
            found.append(f"{launch}: {name} {before[name]} → {now[name]}")
    for name in ("wgmma", "mma", "wide_loads"):
        if before[name] and not now[name]:
            found.append(f"{launch}: no {name} any more")
    return found


def test_no_launch_spills_or_loses_its_matrix_instructions_and_wide_loads(triton_folder, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    found = compiled(triton_folder, tmp_path)
    assert sorted(found) == sorted(golden), "launches came or went: see tests/kernels/compiled/gate.py for a new file"
    assert [problem for launch in found for problem in problems(launch, found[launch], golden[launch])] == []


def test_a_planted_configuration_that_spills_is_caught(triton_folder, tmp_path):
    row = json.dumps({"block_n": 256, "num_warps": 4, "pdl": 0})
    found = compiled(triton_folder, tmp_path, "lora T=512 r=128", "sgmv_expand", row)
    expand = {launch: now for launch, now in found.items() if "_expand" in launch}
    assert any("spills" in problem for launch, now in expand.items() for problem in problems(launch, now, now))


def test_a_planted_product_that_goes_on_while_its_operand_is_written_to_is_caught(triton_folder, tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    kernel = tmp_path / "kernels/quantised_linear/triton_kernel.py"
    source = kernel.read_text()
    assert source.count("if WAITS:") == 1
    kernel.write_text(source.replace("if WAITS:", "if False:"))
    row = json.dumps({"block_m": 256, "block_n": 128, "block_k": 64, "programs": 132, "pdl": 1} | EIGHT_WARPS)
    found = compiled(triton_folder, tmp_path, "int8 14336→4096 T=256", "quantised_linear", row, folder=tmp_path)
    assert any("overwritten" in problem for launch, now in found.items() for problem in problems(launch, now, now))


def test_a_planted_configuration_without_tensor_cores_is_caught():
    before = {
        "shared_bytes": 4096,
        "registers": 90,
        "stack": 0,
        "spills": 0,
        "atomics": 0,
        "overwritten": 0,
        "wgmma": 0,
        "mma": 8,
        "wide_loads": 4,
        "narrow_loads": 2,
    }
    assert problems("a launch", {**before, "mma": 0}, before) == ["a launch: no mma any more"]
