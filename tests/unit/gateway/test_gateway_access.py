"""Whom each route of the public API lets in: walked over the app's own route table."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_harness import House, eventually, rows
from litestar import get, post
from litestar.handlers import HTTPRouteHandler

from gateway.access import KeyScope, handlers_of, needs, needs_any_key, undeclared
from gateway.app import public_app
from gateway.auth import holder_of
from gateway.errors import ApiError
from gateway.failures import MAX_FAILURES, FailedAttempts
from tenants import keys
from tenants.directory import bump_epoch
from tenants.key_repository import KeyRepository
from tenants.limits import KEY_SCOPES
from tenants.repositories import TenantRepository
from tenants.secrets import Secrets
from tenants.tables import LedgerEntry, RequestRecord
from tests import plain
from tests.tiny import tiny_adapter, write_peft_dir

ABSENT = "a" * 12
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def routes(house: House) -> dict[tuple[str, str], HTTPRouteHandler]:
    return {(method, path): handler for method, path, handler in handlers_of(public_app(house.parts))}


Ask = Callable[[httpx.Client, str], httpx.Response]

# How to name somebody's thing at each route, by its name or id. A route that isn't here fails the matrix; None: the
# route names nothing, and answers about the caller alone.
NAMING: dict[tuple[str, str], Ask | None] = {
    ("POST", "/v1/chat/completions"): lambda http, name: http.post(
        "/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "hi"}]}
    ),
    ("POST", "/v1/completions"): lambda http, name: http.post("/completions", json=BODY | {"model": name}),
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model_id}"): lambda http, name: http.get(f"/models/{name}"),
    ("POST", "/v1/adapters"): None,
    ("GET", "/v1/adapters"): None,
    ("GET", "/v1/adapters/{name}"): lambda http, name: http.get(f"/adapters/{name}"),
    ("POST", "/v1/adapters/{name}/rollback"): lambda http, name: http.post(
        f"/adapters/{name}/rollback", json={"version": 1}
    ),
    ("DELETE", "/v1/adapters/{name}"): lambda http, name: http.delete(f"/adapters/{name}"),
    ("PUT", "/v1/adapters/{name}/files/{file}"): None,
    ("POST", "/v1/adapters/{name}/commit"): lambda http, name: http.post(
        f"/adapters/{name}/commit", json={"base_model": name}
    ),
    ("GET", "/v1/requests/{request_id}"): lambda http, name: http.get(f"/requests/{name}"),
    ("POST", "/v1/webhooks"): None,
    ("GET", "/v1/webhooks"): None,
    ("GET", "/v1/webhooks/{endpoint_id}"): lambda http, name: http.get(f"/webhooks/{name}"),
    ("POST", "/v1/webhooks/{endpoint_id}"): lambda http, name: http.post(f"/webhooks/{name}", json={}),
    ("DELETE", "/v1/webhooks/{endpoint_id}"): lambda http, name: http.delete(f"/webhooks/{name}"),
    ("POST", "/v1/webhooks/{endpoint_id}/rotate"): lambda http, name: http.post(f"/webhooks/{name}/rotate", json={}),
    ("POST", "/v1/webhooks/{endpoint_id}/test"): lambda http, name: http.post(f"/webhooks/{name}/test"),
    ("GET", "/v1/webhooks/{endpoint_id}/deliveries"): lambda http, name: http.get(f"/webhooks/{name}/deliveries"),
    ("GET", "/v1/organization/events"): lambda http, name: http.get(f"/organization/events?after={name}"),
    ("GET", "/v1/organization/usage/completions"): None,
    ("GET", "/v1/organization/costs"): None,
    ("GET", "/v1/organization/credit"): None,
    ("GET", "/v1/organization/slo"): None,
    ("GET", "/v1/organization/invoices"): None,
    ("GET", "/v1/organization/invoices/{invoice_id}"): lambda http, name: http.get(f"/organization/invoices/{name}"),
    ("GET", "/v1/organization/invoices/{invoice_id}/credit-notes"): lambda http, name: http.get(
        f"/organization/invoices/{name}/credit-notes"
    ),
    ("GET", "/v1/organization/invoices/{invoice_id}/credit-notes/{credit_note_id}"): lambda http, name: http.get(
        f"/organization/invoices/{name}/credit-notes/crn_0"
    ),
    ("GET", "/health"): None,
    ("GET", "/v1/openapi.json"): None,
}
# Here a name is one that the caller may take: with nothing of its own staged under it, it is told so.
NEW_NAMES = {("POST", "/v1/adapters/{name}/commit")}


def upload(house: House, key: str, name: str, folder) -> None:
    files = write_peft_dir(folder, tiny_adapter(seed=5))
    with house.http(key) as http:
        answer = http.post(
            "/adapters",
            data={"name": name, "base_model": "tiny"},
            files={file.name: (file.name, file.read_bytes()) for file in files.iterdir()},
        )
    assert answer.status_code == 201, answer.text


@pytest.fixture(scope="module")
def neighbours(house: House, tmp_path_factory) -> Iterator[tuple[str, str, str]]:
    """Keys of A and B, and a request id of B, who has an adapter."""
    mine, theirs = house.new_tenant("matrix-a"), house.new_tenant("matrix-b")
    upload(house, theirs, "theirs-12345", tmp_path_factory.mktemp("adapter"))
    with house.http(theirs) as http:
        assert http.put("/adapters/theirs-12345/files/adapter_config.json", content=b"{}").status_code == 200
        request_id = http.post("/completions", json=BODY | {"model": "theirs-12345"}).headers["x-request-id"]
    house.receipt(theirs, request_id)
    yield mine, theirs, request_id
    uploads = house.parts.uploads
    uploads.drop(uploads.claim(house.tenants[theirs], "theirs-12345"))


def same(answer: httpx.Response, name: str) -> tuple[int, bytes, list[str]]:
    """What can be told from an answer, apart from the echoed name and what differs between any two calls."""
    fleeting = ("x-request-id", "openai-processing-ms", "date")
    headers = [f"{key}: {value}" for key, value in answer.headers.items() if key not in fleeting]
    return answer.status_code, answer.content.replace(name.encode(), b"NAME"), headers


def test_another_tenants_things_are_absent_byte_for_byte_at_every_route(house: House, neighbours):
    mine, theirs, request_id = neighbours
    assert set(routes(house)) == set(NAMING), "a route is not in the matrix"
    with house.http(mine) as me, house.http(theirs) as them:
        for (method, path), ask in NAMING.items():
            if ask is None:
                continue
            name = request_id if "request_id" in path else "theirs-12345"
            absent = request_id[:-12] + "0" * 12 if "request_id" in path else ABSENT
            not_mine, nothing = ask(me, name), ask(me, absent)
            assert not_mine.status_code == (400 if (method, path) in NEW_NAMES else 404), (method, path)
            assert same(not_mine, name) == same(nothing, absent), (method, path)
        assert them.get("/adapters/theirs-12345").status_code == 200  # after A has tried to delete it


def test_what_names_nothing_shows_the_callers_own_only(house: House, neighbours):
    mine, theirs, _ = neighbours
    with house.http(mine) as http:
        for path in (
            "/models",
            "/adapters",
            *(f"/organization/{what}?start_time=1" for what in ("usage/completions", "costs")),
        ):
            answer = http.get(path)
            assert answer.status_code == 200
            assert "theirs" not in answer.text
            assert house.tenants[theirs] not in answer.text


def test_every_route_but_health_and_the_document_wants_a_key(house: House):
    for method, path in routes(house):
        answer = plain.request(method, house.url + path.replace("{", "").replace("}", ""))
        assert answer.status_code == (200 if path in ("/health", "/v1/openapi.json") else 401), (method, path)


# ── scopes ───────────────────────────────────────────────────────────────────────────────────────


async def _new_key(house: House, tenant_id: str, scopes: tuple[str, ...], limits: dict[str, Any]) -> keys.Minted:
    new = keys.issue("live", Secrets.load_or_create(house.settings.secrets))
    async with house.parts.database.transaction() as session:
        repository = KeyRepository(session)
        await repository.create(tenant_id, new, scopes=scopes)
        for changes in limits.get("each", []):
            await repository.set_limits(tenant_id, new.minted.key_id, changes)
    await house.parts.pipeline.directory.refresh()
    return new.minted


def new_key(house: House, of: str, *scopes: str, each: tuple[dict, ...] = ()) -> keys.Minted:
    """Another key of that key's tenant, with these scopes (all) and limits."""
    return house.on_loop(_new_key(house, house.tenants[of], scopes or KEY_SCOPES, {"each": each}))


def test_a_key_without_the_routes_scope_is_403_at_every_route_and_passes_with_it(house: House, key: str):
    table = routes(house)
    wanted = {handler.opt["access"].scope for handler in table.values()} - {None}
    assert wanted == set(KEY_SCOPES)
    made = {scope: new_key(house, key, scope).text for scope in KEY_SCOPES}
    for (method, path), handler in table.items():
        scope: KeyScope | None = handler.opt["access"].scope
        for held, text in made.items():
            headers = {"authorization": f"Bearer {text}"}
            answer = plain.request(method, house.url + path.replace("{", "").replace("}", ""), headers=headers)
            refused = answer.status_code == 403
            assert refused == (scope is not None and scope != held), (method, path, held)
            if refused:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "insufficient_scope")


@get("/v1/planted")
async def undeclared_route() -> dict[str, str]:
    return {}


@post("/v1/planted", opt=needs("inference"))
async def unmetered_route() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("planted", "says"),
    [(undeclared_route, "GET /v1/planted declares no access"), (unmetered_route, "POST /v1/planted declares no meter")],
)
def test_an_app_with_a_route_without_scope_or_meter_is_not_built(house: House, planted, says: str):
    with pytest.raises(AssertionError, match=says):
        public_app(house.parts, planted)


def test_a_declared_route_can_be_planted(house: House):
    @get("/v1/planted", opt=needs_any_key())
    async def declared() -> dict[str, str]:
        return {}

    app = public_app(house.parts, declared)
    assert undeclared(app) == []
    assert ("GET", "/v1/planted") in {(method, path) for method, path, _ in handlers_of(app)}


def test_every_metered_route_books_exactly_what_it_ran(house: House):
    key = house.new_tenant("metered")
    metered = [path for (_, path), handler in routes(house).items() if handler.opt["access"].metered]
    assert metered == ["/v1/chat/completions", "/v1/completions"]
    with house.http(key) as http:
        for path in metered:
            body = BODY | {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            answer = http.post(path.removeprefix("/v1"), json=body)
            assert answer.status_code == 200, answer.text
            receipt = house.receipt(key, answer.headers["x-request-id"])
            assert receipt["tokens"]["output"] == answer.json()["usage"]["completion_tokens"] == 4
    assert len(rows(house, key, RequestRecord)) == len(metered)


# ── revocation in the middle of a stream ─────────────────────────────────────────────────────────


async def _revoke(house: House, tenant_id: str, key_id: str) -> None:
    async with house.parts.database.transaction() as session:
        await KeyRepository(session).revoke(tenant_id, key_id)
    await bump_epoch(house.parts.pipeline.directory._redis)


async def _suspend(house: House, tenant_id: str, key_id: str) -> None:
    async with house.parts.database.transaction() as session:
        await TenantRepository(session).set_status(tenant_id, "suspended")
    await bump_epoch(house.parts.pipeline.directory._redis)


async def _delete(house: House, tenant_id: str, key_id: str) -> None:
    async with house.parts.database.transaction() as session:
        await TenantRepository(session).delete(tenant_id)
    await bump_epoch(house.parts.pipeline.directory._redis)


@pytest.mark.parametrize("end", [_revoke, _suspend, _delete])
def test_a_stream_whose_key_ends_gets_an_error_event_and_is_billed_for_what_was_made(house: House, end):
    key = house.new_tenant(f"mid-stream{end.__name__}")
    tenant_id, key_id = house.tenants[key], keys.parse(key)
    other = house.new_tenant(f"bystander{end.__name__}")
    running = threading.Event()
    bystander: list[str] = []

    def stand_by() -> None:
        with house.http(other) as http, http.stream("POST", "/completions", json=long_body) as answer:
            for line in answer.iter_lines():
                running.set()
                bystander.append(line)

    long_body = BODY | {"model": "tiny", "max_tokens": 110, "stream": True}
    thread = threading.Thread(target=stand_by)
    thread.start()
    assert running.wait(20)
    lines: list[str] = []
    with house.http(key) as http, http.stream("POST", "/completions", json=long_body | {"n": 100}) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if not lines:
                house.on_loop(end(house, tenant_id, key_id))
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
    thread.join(30)

    assert json.loads(lines[-1])["error"]["code"] == "invalid_api_key"
    assert "[DONE]" not in lines
    assert bystander[-2:] == ["data: [DONE]", ""]

    def booked() -> RequestRecord | None:
        return next((row for row in rows(house, key, RequestRecord) if row.request_id == request_id), None)

    record = eventually(booked)
    assert (record.outcome, record.billed) == (499, True)
    assert 0 < record.output_tokens < 100 * 110
    quantities = {entry.meter: entry.quantity for entry in rows(house, key, LedgerEntry)}
    assert quantities["output_tokens"] == record.output_tokens
    with house.http(key) as http:
        assert http.get("/models").status_code == 401


# ── limits of one model or adapter ───────────────────────────────────────────────────────────────


def test_a_keys_limit_of_one_model_or_adapter_binds_there_only(house: House, tmp_path):
    owner = house.new_tenant("scoped")
    upload(house, owner, "narrow", tmp_path)
    each = ({"adapter": "narrow", "requests_per_minute": 1}, {"model": "tiny", "requests_per_minute": 3})
    limited = new_key(house, owner, each=each).text

    def codes(key: str, model: str, times: int) -> list[int]:
        with house.http(key) as http:
            return [http.post("/completions", json=BODY | {"model": model}).status_code for _ in range(times)]

    assert codes(limited, "narrow", 2) == [200, 429]
    assert codes(limited, "tiny", 3) == [200, 200, 429]  # the adapter's request was one of the model's three
    assert codes(owner, "narrow", 3) == [200] * 3  # another key of the tenant
    with house.http(limited) as http:
        refused = http.post("/completions", json=BODY | {"model": "narrow"})
    assert "for the" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) <= 60


# ── a key just made ──────────────────────────────────────────────────────────────────────────────


def test_a_key_works_from_the_moment_it_was_made(house: House, key: str):
    """As a script does that makes one and uses it at once, while no gateway has looked for changes yet."""

    async def make() -> str:
        directory = house.parts.pipeline.directory
        new = keys.issue("live", Secrets.load_or_create(house.settings.secrets))
        await directory.next_look()
        async with house.parts.database.transaction() as session:
            await KeyRepository(session).create(house.tenants[key], new)
        await bump_epoch(directory._redis)
        assert directory.authenticate(new.minted.text) is None
        return new.minted.text

    fresh = house.on_loop(make())
    with house.http(fresh) as http, house.http(keys.mint("live").text) as stranger:
        answers = [http.get("/models"), stranger.get("/models")]

    assert [answer.status_code for answer in answers] == [200, 401]


# ── guessing ─────────────────────────────────────────────────────────────────────────────────────


def test_after_many_wrong_keys_an_address_is_told_to_wait_and_good_keys_pass(house: House, key: str):
    try:
        with house.http("tn_live_" + "0" * 36) as guesser:
            answers = [guesser.get("/models") for _ in range(MAX_FAILURES + 20)]
        assert {answer.status_code for answer in answers} == {401, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)  # later ones may be let through again
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert plain.get(house.url + "/v1/models").status_code == 401  # no key at all is no guess
        with house.http(key) as http:
            assert http.get("/models").status_code == 200
    finally:
        house.parts.pipeline.failures._seen.clear()


@pytest.fixture
def failures(house: House, monkeypatch) -> Iterator[FailedAttempts]:
    """The house's, at a moment that does not pass."""
    failures = house.parts.pipeline.failures
    monkeypatch.setattr(failures, "_clock_s", lambda: 1e6)
    yield failures
    failures._seen.clear()


def test_an_address_that_guessed_too_often_is_told_so_without_a_look_at_the_database(
    house: House, key: str, failures: FailedAttempts, monkeypatch
):
    asked = []
    monkeypatch.setattr(house.parts.pipeline.directory, "next_look", lambda: asked.append(1))
    with house.http(keys.mint("live").text) as guesser, house.http(key) as http:
        guesser.get("/health")
        for _ in range(MAX_FAILURES):
            failures.record("127.0.0.1")
        answers = [guesser.get("/models"), http.get("/models")]

    assert [answer.status_code for answer in answers] == [429, 200]
    assert asked == []


def test_of_one_address_no_more_guesses_wait_than_it_may_fail_with(house: House, failures: FailedAttempts, monkeypatch):
    monkeypatch.setattr("tenants.directory._LOOK_S", 60.0)
    directory, scope = house.parts.pipeline.directory, {"client": ("203.0.113.7", 1)}

    async def guess() -> str | None:
        header = f"Bearer {keys.mint('live').text}"
        with pytest.raises(ApiError) as refused:
            await holder_of(header, directory, directory.authenticate, failures, scope)  # pyright: ignore[reportArgumentType]
        return refused.value.code

    async def many() -> Counter:
        return Counter(await asyncio.gather(*(guess() for _ in range(MAX_FAILURES + 50))))

    assert house.on_loop(many()) == {"invalid_api_key": MAX_FAILURES, "rate_limit_exceeded": 50}


def test_what_turns_out_to_be_a_new_key_was_no_guess(house: House, key: str, failures: FailedAttempts, monkeypatch):
    monkeypatch.setattr("tenants.directory._LOOK_S", 60.0)
    directory, new = house.parts.pipeline.directory, keys.issue("live", Secrets.load_or_create(house.settings.secrets))

    async def make() -> None:
        async with house.parts.database.transaction() as session:
            await KeyRepository(session).create(house.tenants[key], new)
        await holder_of(f"Bearer {new.minted.text}", directory, directory.authenticate, failures, {"client": ("a", 1)})  # pyright: ignore[reportArgumentType]

    house.on_loop(make())
    assert [failures.record("a") for _ in range(MAX_FAILURES)] == [None] * MAX_FAILURES
