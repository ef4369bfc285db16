"""The four products of a layer at a decode's few rows: cuBLAS as it is, and in parts whose fp32 sums stay apart.

    python3 -m ops.bench.gpu_products [--rows 32] [--out FOLDER]

A product of few rows has too few tiles for all multiprocessors, so cuBLAS cuts the inputs (split K) and adds the parts
up by a launch of its own, 2 µs each. As a batch of products over parts of the inputs it needs none, if whoever reads
the result adds up. µs, weights rotated past L2; "floor": the weight at 4.2 TB/s.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.bench.gpu.timing import median_us, num_sets

SIZES = {"q,k,v": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}  # Llama-3-8B
PARTS = (2, 4, 7, 8)
BYTES_S = 4.2e12


def by_parts(x: Tensor, weight: Tensor, num_parts: int) -> Tensor:
    """x [T, in], weight [out, in] → [parts, T, out] fp32, whose sum is x · weightᵀ."""
    (rows, size_in), size_out = x.shape, weight.shape[0]
    parts = x.view(rows, num_parts, size_in // num_parts).transpose(0, 1)
    columns = weight.view(size_out, num_parts, size_in // num_parts).permute(1, 2, 0)
    return torch.bmm(parts, columns, out_dtype=torch.float32)


def measure(num_rows: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, (size_out, size_in) in SIZES.items():
        count = num_sets(size_out * size_in * 2)
        weights = [torch.randn(size_out, size_in, device="cuda").bfloat16() / 64 for _ in range(count)]
        x = torch.randn(num_rows, size_in, device="cuda").bfloat16()
        row: dict[str, object] = {"product": name, "rows": num_rows, "floor": size_out * size_in * 2 / BYTES_S * 1e6}
        row["whole"] = median_us([partial(F.linear, x, weight) for weight in weights])
        exact = x.double() @ weights[0].double().T
        for num_parts in (parts for parts in PARTS if size_in % (64 * parts) == 0):
            wrong = (by_parts(x, weights[0], num_parts).sum(0).double() - exact).norm() / exact.norm()
            assert float(wrong) < 1e-5, (name, num_parts, float(wrong))
            row[f"{num_parts} parts"] = median_us([partial(by_parts, x, weight, num_parts) for weight in weights])
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,32,64")
    parser.add_argument("--out", type=Path, default=Path("build"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        found = [row for rows in options.rows.split(",") for row in measure(int(rows))]
    (options.out / "gpu_products.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
