"""Where webhooks may go: URLs, addresses, and names that lead elsewhere at the second look."""

import asyncio
import threading
from ipaddress import ip_address

import pytest

from gateway.webhooks.addresses import (
    MAX_LOOKUPS_OF_ONE,
    MAX_URL_LENGTH,
    BadDestination,
    Resolver,
    destination_of,
    is_permitted,
)

PUBLIC = ("93.184.215.14", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:2800:21f:cb07:6820:80da:af6b:8b2c")
NOT_PUBLIC = {
    "this host": "0.0.0.0",
    "private": "10.0.0.1",
    "private in the middle": "172.16.0.1",
    "private at home": "192.168.1.1",
    "loopback": "127.0.0.1",
    "loopback too": "127.8.9.10",
    "link-local, where clouds have their metadata": "169.254.169.254",
    "CGNAT": "100.64.0.1",
    "protocol assignments": "192.0.0.8",
    "documentation": "192.0.2.1",
    "benchmarks": "198.18.0.1",
    "6to4 relays": "192.88.99.1",
    "multicast": "224.0.0.1",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "IPv6 unspecified": "::",
    "IPv6 loopback": "::1",
    "mapped": "::ffff:10.0.0.1",
    "mapped, though public": "::ffff:8.8.8.8",
    "compatible": "::8.8.8.8",
    "NAT64": "64:ff9b::a00:1",
    "NAT64 of one's own": "64:ff9b:1::a00:1",
    "6to4": "2002:a00:1::1",
    "Teredo": "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "IPv6 documentation": "2001:db8::1",
    "IPv6 documentation, new": "3fff::1",
    "ULA": "fd00::1",
    "IPv6 link-local": "fe80::1",
    "with a zone": "fe80::1%eth0",
    "site-local": "fec0::1",
    "IPv6 multicast": "ff02::1",
    "discard-only": "100::1",
}


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_may_be_called(text: str):
    assert is_permitted(ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC.values(), ids=NOT_PUBLIC)
def test_every_other_address_may_not(text: str):
    assert not is_permitted(ip_address(text))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("https://hooks.example/a?b=c", "hooks.example", 443),
        ("https://hooks.example:443", "hooks.example", 443),
        ("https://Hooks.Example:8443/", "hooks.example", 8443),
        ("https://bücher.example/ä", "xn--bcher-kva.example", 443),
        ("https://8.8.8.8/", "8.8.8.8", 443),
        ("https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", 443),
    ],
)
def test_a_url_may_be(text: str, host: str, port: int):
    found = destination_of(text)
    assert (found.host.strip("[]"), found.port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hooks.example",
        "/hooks",
        "https://",
        "https:///path",
        "http://hooks.example/",
        "ftp://hooks.example/",
        "file:///etc/passwd",
        "https://user:word@hooks.example/",
        "https://user@hooks.example/",
        "https://@hooks.example/",
        "https://hooks.example\\@10.0.0.1/",
        "https://hooks.example/#here",
        "https://hooks.example/\r\nx-evil: 1",
        "https://hooks.example:22/",
        "https://hooks.example:80/",
        "https://hooks.example:0/",
        "https://hooks.example:65536/",
        "https://hooks..example/",
        "https://-hooks.example/",
        "https://hooks_.example/",
        "https://hooks.example./",
        "https://" + "a" * 64 + ".example/",
        "https://" + "a." * 130 + "example/",
        "https://hooks.example/" + "a" * MAX_URL_LENGTH,
        "https://hooks.example/" + "ä" * (MAX_URL_LENGTH // 3),
        "https://127.0.0.1:8443/",
        "https://localhost.:8443/",
        "https://[::1]:8443/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:8080/",
        "http://localhost:8080/",
    ],
)
def test_a_url_may_not_be(text: str):
    with pytest.raises(BadDestination):
        destination_of(text)


def test_in_tests_loopback_may_be_called_without_tls_and_nothing_else_may():
    assert destination_of("http://127.0.0.1:8080/x", allow_loopback=True).port == 8080
    assert destination_of("http://localhost:8080/x", allow_loopback=True).host == "localhost"
    for text in ("http://hooks.example:8080/", "https://10.0.0.1/", "http://8.8.8.8:8080/"):
        with pytest.raises(BadDestination):
            destination_of(text, allow_loopback=True)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def address_of(url: str, *answers: list[str]) -> str:
    """Where a name leads whose server gives these answers, one after the other."""
    rest = iter(answers)
    resolver = Resolver(lambda host, port: next(rest))
    try:
        return str(asyncio.run(resolver.address_of(destination_of(url), "ten_a")))
    finally:
        resolver.close()


def test_of_a_names_addresses_a_public_one_is_taken_ipv4_first():
    assert address_of("https://a.example/", ["2606:4700::1", "10.0.0.1", "8.8.8.8"]) == "8.8.8.8"
    assert address_of("https://a.example/", ["2606:4700::1", "fd00::1"]) == "2606:4700::1"


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["10.0.0.1", "fd00::1"], ["::ffff:8.8.8.8"], []])
def test_a_name_that_leads_to_no_public_address_is_refused(answer: list[str]):
    with pytest.raises(BadDestination):
        address_of("https://a.example/", answer)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "017700000001"])
def test_numbers_that_the_system_takes_for_loopback_are_refused(host: str):
    """By the system's own look-up, which reads them as inet_aton does."""
    resolver = Resolver()
    try:
        with pytest.raises((BadDestination, OSError)):
            asyncio.run(resolver.address_of(destination_of(f"https://{host}/"), "ten_a"))
    finally:
        resolver.close()


def test_a_tenants_name_server_that_does_not_answer_takes_up_no_more_than_its_threads():
    """Also when nobody waits for its answers any more."""
    go_on, hanging = threading.Event(), threading.Semaphore(0)

    def look_up(host: str, port: int) -> list[str]:
        if host.startswith("slow"):
            hanging.release()
            go_on.wait(10)
        return ["8.8.8.8"]

    async def main() -> None:
        resolver = Resolver(look_up)
        slow = [
            asyncio.create_task(resolver.address_of(destination_of(f"https://slow{n}.example/"), "ten_slow"))
            for n in range(50)
        ]
        for _ in range(MAX_LOOKUPS_OF_ONE):
            await asyncio.to_thread(hanging.acquire)
        for task in slow[:MAX_LOOKUPS_OF_ONE]:
            task.cancel()
        assert str(await resolver.address_of(destination_of("https://quick.example/"), "ten_quick")) == "8.8.8.8"
        assert not hanging.acquire(blocking=False)
        go_on.set()
        outcomes = await asyncio.gather(*slow, return_exceptions=True)
        assert [str(each) for each in outcomes[MAX_LOOKUPS_OF_ONE:]] == ["8.8.8.8"] * (50 - MAX_LOOKUPS_OF_ONE)
        resolver.close()

    asyncio.run(main())
