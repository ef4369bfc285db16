"""rms_norm, rope, store_kv, qk_rope_kv and silu_mul under Triton's interpreter."""

import pytest
import torch

from kernels.qk_rope_kv import triton_kernel as qk_rope_kv_kernel
from kernels.rms_norm import triton_kernel as rms_norm_kernel
from kernels.rope import triton_kernel as rope_kernel
from kernels.silu_mul import triton_kernel as silu_mul_kernel
from kernels.store_kv import triton_kernel as store_kv_kernel
from kernels.testing import Heads
from tests.kernels.interpreted.checks import (
    check_add_parts_rms_norm,
    check_add_rms_norm,
    check_qk_rope_kv,
    check_rms_norm,
    check_rope,
    check_silu_mul,
    check_store_kv,
    planted,
)

FLOAT, BF16 = torch.float32, torch.bfloat16
BOTH = pytest.mark.parametrize("dtype", [FLOAT, BF16])


@BOTH
@pytest.mark.parametrize("shape", [(1, 97), (7, 576), (17, 1000), (3, 4096), (5, 3, 64), (2, 9, 80)])
def test_rms_norm_equals_its_reference(shape, dtype):
    check_rms_norm(rms_norm_kernel, shape, dtype)


@BOTH
@pytest.mark.parametrize("shape", [(1, 97), (7, 576), (3, 4096)])
def test_rms_norm_adds_the_residual_in_place_before_it(shape, dtype):
    check_add_rms_norm(rms_norm_kernel, shape, dtype)


@BOTH
@pytest.mark.parametrize(("num_parts", "shape"), [(1, (3, 97)), (2, (1, 97)), (4, (7, 576)), (7, (3, 4096))])
def test_rms_norm_adds_parts_up_in_their_order_before_it(num_parts, shape, dtype):
    check_add_parts_rms_norm(rms_norm_kernel, num_parts, shape, dtype)


def test_a_rms_norm_that_forgets_the_last_part_is_caught(tmp_path):
    faulty = planted(rms_norm_kernel, ("tl.static_range(1, PARTS)", "tl.static_range(1, PARTS - 1)"), tmp_path)
    with pytest.raises(AssertionError):
        check_add_parts_rms_norm(faulty, 4, (3, 97), FLOAT)


def test_rms_norm_without_its_mask_is_caught(tmp_path):
    fault = ("b_x = tl.load(p_own, mask=mask, other=0.0)\n    for _", "b_x = tl.load(p_own)\n    for _")
    faulty = planted(rms_norm_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_rms_norm(faulty, (3, 97), FLOAT)


def test_rms_norm_with_swapped_strides_is_caught(tmp_path):
    fault = (
        "(i_rows // num_inner) * stride_outer + (i_rows % num_inner) * stride_inner",
        "(i_rows // num_inner) * stride_inner + (i_rows % num_inner) * stride_outer",
    )
    faulty = planted(rms_norm_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_rms_norm(faulty, (5, 3, 64), FLOAT)


@BOTH
@pytest.mark.parametrize("heads", [Heads(4, 4, 8), Heads(9, 9, 64), Heads(3, 3, 80), Heads(2, 2, 256)])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_rope_equals_its_reference(num_tokens, heads, dtype):
    check_rope(rope_kernel, num_tokens, heads, dtype)


def test_rope_with_swapped_strides_is_caught(tmp_path):
    fault = (
        "i_token * stride_token + i_heads[:, None] * stride_head",
        "i_token * stride_head + i_heads[:, None] * stride_token",
    )
    faulty = planted(rope_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_rope(faulty, 4, Heads(3, 3, 16), FLOAT)


@pytest.mark.parametrize(
    "heads", [Heads(num_kv_heads=3, head_dim=64), Heads(num_kv_heads=1, head_dim=80, block_size=16)]
)
@pytest.mark.parametrize("dtypes", [(FLOAT, FLOAT), (BF16, BF16), (FLOAT, BF16)])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_store_kv_writes_its_tokens_and_nothing_else(num_tokens, heads, dtypes):
    check_store_kv(store_kv_kernel, num_tokens, heads, dtypes)


def test_store_kv_without_its_mask_is_caught(tmp_path):
    faulty = planted(store_kv_kernel, ("mask = o_size < SIZE", "mask = o_size < BLOCK"), tmp_path)
    with pytest.raises(AssertionError):
        check_store_kv(faulty, 5, Heads(num_kv_heads=3, head_dim=8), (FLOAT, FLOAT))


def test_store_kv_into_the_next_token_is_caught(tmp_path):
    fault = ("i_slot = tl.load(p_slot_mapping + i_token)", "i_slot = tl.load(p_slot_mapping + i_token * 0)")
    faulty = planted(store_kv_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_store_kv(faulty, 5, Heads(), (FLOAT, FLOAT))


@BOTH
@pytest.mark.parametrize(("num_rows", "size"), [(1, 97), (7, 1536), (3, 2500)])
def test_silu_mul_equals_its_reference(num_rows, size, dtype):
    check_silu_mul(silu_mul_kernel, num_rows, size, dtype)


def test_silu_mul_with_gate_and_up_in_the_wrong_order_is_caught(tmp_path):
    faulty = planted(
        silu_mul_kernel, ("b_gate / (1.0 + tl.exp(-b_gate)) * b_up", "b_up / (1.0 + tl.exp(-b_up)) * b_gate"), tmp_path
    )
    with pytest.raises(AssertionError):
        check_silu_mul(faulty, 3, 97, FLOAT)


@BOTH
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    "heads",
    [Heads(4, 4, 8), Heads(9, 3, 64), Heads(12, 1, 80), Heads(4, 2, 96), Heads(2, 2, 256), Heads(16, 8, 128)],
    ids=["multi-head", "groups of 3", "multi-query 80", "head size 96", "head size 256", "groups of 2"],
)
def test_qk_rope_kv_equals_its_reference(heads, norms, dtype):
    check_qk_rope_kv(qk_rope_kv_kernel, 7, heads, dtype, norms=norms)


QK_ROPE_KV_FAULTS = {
    "a row that fills up the step is stored": ("b_second, mask & (i_slot >= 0)", "b_second, mask & (i_slot >= -1)"),
    "keys with the query heads' norm": ("p_key_norm if is_key else p_query_norm", "p_query_norm"),
    "a norm of half a head": ("tl.sum(b_second * b_second, 1)) / HEAD_DIM", "0.0) / HEAD_DIM"),
    "swapped halves": ("rotated(b_first, b_second, b_cosines", "rotated(b_second, b_first, b_cosines"),
    "a missing mask of the heads": ("i_heads < tl.where(is_key, KV_HEADS, NUM_HEADS)", "i_heads < NUM_HEADS"),
    "values of the token before": ("p_from = p_values + i_token", "p_from = p_values + tl.maximum(i_token - 1, 0)"),
}


@pytest.mark.parametrize("fault", QK_ROPE_KV_FAULTS.values(), ids=QK_ROPE_KV_FAULTS)
def test_a_fault_of_qk_rope_kv_is_caught(fault, tmp_path):
    faulty = planted(qk_rope_kv_kernel, fault, tmp_path)
    with pytest.raises(AssertionError):
        check_qk_rope_kv(faulty, 7, Heads(9, 3, 16), FLOAT, norms=True)
