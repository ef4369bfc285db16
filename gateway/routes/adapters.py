"""/v1/adapters: upload, list, show, roll back, delete. Everything is the caller's own."""

import asyncio
from typing import Any

from litestar import Request, Response, delete, get, post, put
from litestar.params import FromPath

from gateway.access import needs
from gateway.adapters.adapters import Candidate, not_found, told
from gateway.adapters.check import disk_may_be_full
from gateway.adapters.upload import CONFIG, FILES, WEIGHTS, read_file, read_upload
from gateway.call import call_of
from gateway.errors import ApiError, invalid
from gateway.parts import Parts, parts_of, principal_of
from gateway.resources import AdapterBody, AdapterDetail, AdapterFile, Deleted, Listed, LiveVersion
from gateway.schemas import MAX_BODY_BYTES, Commit, Rollback, decode
from tenants.adapters.staged import MAX_AGE_S
from tenants.directory import Principal
from tenants.errors import LimitExceeded, NotFound
from tenants.tables import AdapterVersion


@post("/v1/adapters", status_code=201, request_max_body_size=None, opt=needs("adapters:write"))
async def upload_adapter(request: Request) -> Response:
    """Reads, checks and publishes within the call: 201 means it can be used."""
    principal, parts, call = principal_of(request), parts_of(request), call_of(request.scope)
    with disk_may_be_full(), parts.adapters.staging(principal) as weights:
        look = _look(parts, principal)
        upload = await read_upload(call, weights, principal.adapter_limits.max_adapter_bytes, look)
        fields = upload.fields
        expected = _expected_version(fields.get("expected_version"))
        candidate = Candidate(fields.get("name", ""), fields.get("base_model", ""), upload.config, weights, expected)
        version = await parts.adapters.publish(principal, candidate)
    return Response(_version(version), status_code=201)


@put(
    "/v1/adapters/{name:str}/files/{file:str}", status_code=200, request_max_body_size=None, opt=needs("adapters:write")
)
async def put_file(request: Request, name: FromPath[str], file: FromPath[str]) -> AdapterFile:
    """One file of an upload as a plain body; the answer says what came. Kept for an hour, until its commit."""
    principal, parts, call = principal_of(request), parts_of(request), call_of(request.scope)
    with disk_may_be_full(), parts.adapters.staging(principal) as staged:
        parts.adapters.check_name(name)
        if file not in FILES:
            raise ApiError(f"An adapter's files are {' and '.join(FILES)}.", code="not_found", param="file")
        look = _look(parts, principal)
        received = await read_file(call, file, staged, principal.adapter_limits.max_adapter_bytes, look)
        try:
            await asyncio.to_thread(parts.uploads.put, principal.tenant_id, name, file, staged)
        except LimitExceeded as error:
            raise ApiError(f"This account's limit is reached: {error}.", code="limit_reached") from None
    return AdapterFile(
        adapter=name,
        file=file,
        size_bytes=received.size_bytes,
        sha256=received.sha256,
        expires_at=call.started_unix_ns // 1_000_000_000 + int(MAX_AGE_S),
    )


@post("/v1/adapters/{name:str}/commit", status_code=201, opt=needs("adapters:write"))
async def commit_adapter(request: Request, name: FromPath[str]) -> Response:
    """Publishes the files that were PUT under that name. They are gone when they were published or refused for what
    they are, and stay for another try otherwise."""
    principal, parts = principal_of(request), parts_of(request)
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), Commit)
    parts.adapters.check_name(name)
    with parts.adapters.uploading(principal):
        version = await _commit(parts, principal, name, body)
    return Response(_version(version), status_code=201)


async def _commit(parts: Parts, principal: Principal, name: str, body: Commit) -> AdapterVersion:
    try:
        claimed = await asyncio.to_thread(parts.uploads.claim, principal.tenant_id, name)
    except NotFound:
        raise invalid(f"'{WEIGHTS}' is required: PUT the adapter's files first.", WEIGHTS) from None
    config = claimed / CONFIG
    content = config.read_bytes() if config.exists() else b""
    candidate = Candidate(name, body.base_model, content, claimed / WEIGHTS, body.expected_version)
    try:
        version = await parts.adapters.publish(principal, candidate)
    except BaseException as error:
        if not (isinstance(error, ApiError) and error.code == "invalid_adapter"):
            parts.uploads.restore(principal.tenant_id, name, claimed)
            raise
        await asyncio.to_thread(parts.uploads.drop, claimed)
        raise
    await asyncio.to_thread(parts.uploads.drop, claimed)
    return version


@get("/v1/adapters", opt=needs("adapters:read"))
async def list_adapters(request: Request) -> Listed[AdapterBody]:
    versions = await parts_of(request).adapters.current(principal_of(request))
    return Listed(data=[_version(version) for version in versions])


@get("/v1/adapters/{name:str}", opt=needs("adapters:read"))
async def get_adapter(request: Request, name: FromPath[str]) -> AdapterDetail:
    """The current version, and all live ones with the tiers of each engine that hold their weights."""
    adapters = parts_of(request).adapters
    current, versions = await adapters.versions(principal_of(request), name)
    residency = await adapters.residency(versions)
    shown = [LiveVersion(**_facts(version), residency=residency[version.sha256]) for version in versions]
    return AdapterDetail(**_facts(current), versions=shown)


@post("/v1/adapters/{name:str}/rollback", status_code=200, opt=needs("adapters:write"))
async def rollback_adapter(request: Request, name: FromPath[str]) -> AdapterBody:
    principal = principal_of(request)
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), Rollback)
    adapters = parts_of(request).adapters
    return _version(await adapters.rollback(principal, name, body.version, body.expected_version))


@delete("/v1/adapters/{name:str}", status_code=200, opt=needs("adapters:write"))
async def delete_adapter(request: Request, name: FromPath[str]) -> Deleted:
    """NAME with all its versions, or the one version NAME@VERSION."""
    adapters, principal = parts_of(request).adapters, principal_of(request)
    alias, at, version = name.partition("@")
    if not at:
        await adapters.delete(principal, name)
    elif version.isascii() and version.isdigit() and len(version) <= 9:
        await adapters.delete_version(principal, alias, int(version))
    else:
        raise not_found(name)
    return Deleted(id=name)


def _look(parts: Parts, principal: Principal):
    return lambda weights, file_bytes: parts.adapters.look_at_header(principal, weights, file_bytes)


def _expected_version(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid("'expected_version' is a whole number; 0 = the name must be new.", "expected_version")
    return int(text)


def _version(version: AdapterVersion) -> AdapterBody:
    return AdapterBody(**_facts(version))


def _facts(version: AdapterVersion) -> dict[str, Any]:
    return told(version) | {
        "lora_rank": version.lora_rank,
        "target_modules": version.target_modules,
        "num_pairs_bound": version.num_pairs,
        "size_bytes": version.size_bytes,
        "warnings": version.warnings,
        "created_at": version.created_unix_ns // 1_000_000_000,
    }


handlers = [
    upload_adapter,
    put_file,
    commit_adapter,
    list_adapters,
    get_adapter,
    rollback_adapter,
    delete_adapter,
]
