"""The engine on a GPU against plain torch in fp32, and its graphs against the launches that they hold.

The checks themselves are in ops/bench/gpu_engine_checks.py, which a machine without pytest can run.
"""

import pytest

from ops.bench import gpu_engine_bits
from ops.bench import gpu_engine_checks as checks
from ops.bench import gpu_moe_checks as moe_checks
from ops.bench import gpu_prefix_checks as prefix_checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", ["tiny", "tiny_qwen", "tiny-int8", "tiny-fp8", "tiny-block"])
def test_bf16_logits_are_within_the_bound_of_the_fp32_reference_and_agree_on_the_best(shape: str):
    checks.check_logits_are_those_of_the_reference(shape)


@pytest.mark.parametrize("shape", ["tiny", "tiny_qwen", "tiny_moe"])
def test_replayed_steps_equal_launched_ones_while_the_adapters_change_in_every_step(shape: str):
    checks.check_replay_equals_launching_with_changing_adapters(shape)


def test_a_base_row_has_the_same_bits_beside_rows_with_adapters_and_without():
    checks.check_a_base_row_has_the_same_bits_beside_adapters()


def test_tokens_that_the_host_has_not_seen_feed_the_next_step():
    checks.check_a_step_in_the_air_feeds_the_next()


def test_ops_are_timed_by_events_and_replayed_graphs_as_one():
    checks.check_ops_are_timed_on_the_device_and_steps_by_hand_by_op()


@pytest.mark.parametrize("shape", ["tiny", "tiny_qwen"])
def test_decodes_in_groups_have_the_logits_of_the_reference_in_each_namespace(shape: str):
    prefix_checks.check_groups_give_the_logits_of_the_reference(shape)


def test_groups_replayed_launched_and_repeated_have_the_same_bits_and_change_nobody_elses():
    prefix_checks.check_groups_are_the_same_replayed_launched_and_repeated()


@pytest.mark.parametrize("shape", ["tiny", "tiny_qwen", "tiny_moe", "tiny-int8", "tiny-block"])
def test_a_deterministic_engine_gives_a_request_its_bits_in_whatever_steps_it_is_computed(shape: str):
    gpu_engine_bits.check_deterministic_requests_have_their_bits_in_whatever_steps(shape)


def test_logits_with_experts_are_within_the_bound_of_the_fp32_reference():
    moe_checks.check_logits_with_experts_are_those_of_the_reference()


def test_experts_of_replayed_steps_are_those_of_launched_ones_and_only_tokens_count():
    moe_checks.check_experts_of_replayed_steps_are_those_of_launched_ones()
    moe_checks.check_steps_that_are_filled_up_count_their_tokens_only()


def test_adapters_on_experts_give_the_logits_of_merged_weights_replayed_as_launched():
    moe_checks.check_adapters_on_experts_give_the_logits_of_merged_weights()
    moe_checks.check_adapters_on_experts_replayed_are_those_launched()


def test_a_base_row_has_the_same_bits_beside_adapters_on_experts():
    moe_checks.check_a_base_row_has_the_same_bits_beside_adapters_on_experts()
