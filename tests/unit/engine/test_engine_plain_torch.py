"""engine/gpu/plain_torch: an operator is told what a GPU computes without a kernel."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import Options, resolve_device, step_sizes
from engine.gpu.plain_torch import warn_of, without_kernel
from engine.metering.device_counters import FALLBACKS
from engine.models.config import AttentionConfig, ModelConfig
from tests.tiny import tiny_config
from tests.tiny_moe import MOE

BF16, FLOAT = torch.bfloat16, torch.float32


def of_head_size(head_dim: int) -> ModelConfig:
    return replace(tiny_config(), attention=AttentionConfig(4, 2, head_dim))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [(80, BF16, ()), (96, FLOAT, ()), (128, FLOAT, ()), (256, BF16, ()), (256, FLOAT, ("head_size",))],
)
def test_attention_has_a_kernel_up_to_so_many_bytes_of_a_head(head_dim, dtype, expected):
    assert without_kernel(of_head_size(head_dim), dtype) == expected


def test_experts_have_theirs():
    assert without_kernel(MOE["mixtral"], BF16) == ()


def test_one_line_names_all_of_it(caplog):
    warn_of(("head_size",))

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "attention" in record.message
    assert "tenora_fallbacks_total" in record.message


def test_nothing_is_said_of_a_model_with_all_its_kernels(caplog):
    warn_of(())

    assert not caplog.records


def test_what_is_told_is_what_is_counted():
    reasons = without_kernel(of_head_size(256), FLOAT)
    assert {(kind, reason) for kind in ("kernel", "graph") for reason in reasons} <= set(FALLBACKS)


def options(**changes: object) -> Options:
    return Options("m", Path("m"), kv_blocks=64, deterministic=True, **changes)


def test_a_deterministic_engine_on_a_gpu_takes_no_more_tokens_a_step_than_its_one_shape_and_says_so(caplog):
    caplog.set_level("INFO")
    cuda = torch.device("cuda")

    assert step_sizes(options(), tiny_config(), BF16, cuda).max_step_tokens == 256
    assert step_sizes(options(max_step_tokens=4096), tiny_config(), BF16, cuda).max_step_tokens == 1024
    assert "computed as 1024 tokens" in caplog.text


def test_an_engine_keeps_as_much_of_adapters_in_host_memory_as_it_is_told():
    sizes = step_sizes(options(host_adapter_bytes=5000), tiny_config(), FLOAT, torch.device("cpu"))

    assert sizes.host_adapter_bytes == 5000


def test_a_deterministic_engine_on_a_cpu_has_the_sizes_of_any_other():
    assert step_sizes(options(), tiny_config(), FLOAT, torch.device("cpu")).max_step_tokens == 512


def test_a_deterministic_engine_of_what_has_no_kernel_does_not_start():
    with pytest.raises(ValueError, match="--deterministic"):
        step_sizes(options(), of_head_size(256), FLOAT, torch.device("cuda"))


def test_slots_for_adapters_on_experts_are_asked_for_on_a_gpu_and_all_of_a_cpus():
    def found(device: str, slots: int) -> int | None:
        sizes = step_sizes(options(expert_adapter_slots=slots), MOE["mixtral"], BF16, torch.device(device))
        return sizes.expert_adapter_slots

    assert [found("cuda", 0), found("cuda", 2), found("cpu", 0), found("cpu", 2)] == [0, 2, None, None]
    with pytest.raises(ValueError, match="65 slots for adapters on experts, of 64"):
        found("cuda", 65)
    with pytest.raises(ValueError, match="--expert-adapter-slots"):
        step_sizes(options(expert_adapter_slots=1), tiny_config(), BF16, torch.device("cuda"))


def test_a_deterministic_engine_may_have_experts():
    assert step_sizes(options(), MOE["mixtral"], BF16, torch.device("cuda")).deterministic


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_the_options_name() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"--device cuda: .* finds no GPU"):
        resolve_device("cuda")
