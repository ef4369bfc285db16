import uuid

import pytest

from tenants.errors import ForgedContext
from tenants.meter import MAX_CONTEXT_BYTES, RequestContext, seal, unseal
from tenants.secrets import Secret

KEY = Secret(b"k" * 32)


def context(**changes) -> RequestContext:
    fields = {
        "tenant_id": "ten_" + "a" * 24,
        "key_id": "k" * 10,
        "request_id": str(uuid.UUID(int=1)),
        "attempt": 1,
        "base_model": "smollm2-135m",
        "model": "pirate",
        "adapter_version_id": "adv_" + "b" * 24,
        "flow_class": "interactive",
        "rate_card_id": "rc_" + "c" * 24,
        "admitted_unix_ns": 1_900_000_000_000_000_000,
        "trace_id": "d" * 32,
        "operation": "completions",
        "label": "mine",
    }
    return RequestContext(**(fields | changes))


def test_a_sealed_context_comes_back_as_it_was():
    assert unseal(seal(context(), KEY), KEY) == context()


def test_the_longest_context_fits_and_only_the_label_is_cut():
    longest = context(base_model="m" * 64, model="n" * 80, attempt=2**31, label="é" * 100)
    sealed = seal(longest, KEY)
    assert len(sealed) <= MAX_CONTEXT_BYTES
    back = unseal(sealed, KEY)
    assert back.label == "é" * 64
    assert (back.base_model, back.model) == (longest.base_model, longest.model)


@pytest.mark.parametrize("change", [{"base_model": "m" * 65}, {"model": "é" * 41}, {"tenant_id": "t" * 400}])
def test_a_name_too_long_for_a_context_is_our_own_mistake(change):
    with pytest.raises(ValueError, match="too long"):
        seal(context(**change), KEY)


def test_any_changed_bit_any_cut_and_any_other_key_is_a_forgery():
    sealed = seal(context(), KEY)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1 << place % 8
        with pytest.raises(ForgedContext):
            unseal(bytes(changed), KEY)
    for forged in (b"", sealed[:16], sealed[:-1], sealed + b"\0", b"\0" * 513):
        with pytest.raises(ForgedContext):
            unseal(forged, KEY)
    with pytest.raises(ForgedContext):
        unseal(sealed, Secret(b"l" * 32))
