import hmac
import re

import pytest

from tenants import keys
from tenants.secrets import Secret

PEPPER = Secret(b"p" * 32)


@pytest.mark.parametrize(("kind", "prefix"), [("live", "tn_live_"), ("ops", "tn_ops_")])
def test_a_minted_key_has_the_documented_form_and_parses_to_its_id(kind, prefix):
    minted = keys.mint(kind)
    assert re.fullmatch(prefix + "[0-9A-Za-z]{36}", minted.text)
    assert keys.parse(minted.text) == minted.key_id == minted.text[len(prefix) :][:10]
    assert minted.last4 == minted.text[-4:]


def test_minted_keys_are_all_different_and_are_not_shown_by_repr():
    minted = [keys.mint("live") for _ in range(200)]
    assert len({item.key_id for item in minted}) == len({item.text for item in minted}) == 200
    assert all(item.text not in repr(item) for item in minted)


def test_one_wrong_character_anywhere_is_noticed_without_a_look_up():
    text = keys.mint("live").text
    for place, character in enumerate(text):
        other = "x" if character != "x" else "y"
        assert keys.parse(text[:place] + other + text[place + 1 :]) is None


@pytest.mark.parametrize(
    "text", ["", "tn_live_", "tn_live_" + "a" * 36, "Bearer x", "tn_live_" + "é" * 36, "tn_live_" + "\ud800" * 36]
)
def test_what_is_no_key_parses_to_none_and_can_still_be_digested(text):
    assert keys.parse(text) is None
    assert len(keys.digest(text, PEPPER)) == 32


def test_a_digest_depends_on_the_whole_text_and_on_the_pepper():
    text = keys.mint("live").text
    same = keys.digest(text, PEPPER)
    assert hmac.compare_digest(same, keys.digest(text, PEPPER))
    assert same != keys.digest(text, Secret(b"q" * 32))
    assert same != keys.digest(text + "0", PEPPER)
    assert same != keys.digest(text[:-1], PEPPER)


def test_a_digest_of_a_megabyte_reads_no_more_than_a_key():
    assert keys.digest("a" * 1_000_000, PEPPER) == keys.digest("a" * (keys.MAX_KEY_LENGTH + 1), PEPPER)
