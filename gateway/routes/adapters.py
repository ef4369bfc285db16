"""/v1/adapters: upload, list, show, roll back, delete. Everything is the caller's own."""

from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath

from gateway.access import needs
from gateway.call import call_of
from gateway.parts import parts_of, principal_of
from gateway.schemas import MAX_BODY_BYTES, Rollback, decode
from gateway.upload import read_upload
from tenants.tables import AdapterVersion


@post("/v1/adapters", status_code=201, request_max_body_size=None, opt=needs("adapters:write"))
async def upload_adapter(request: Request) -> Response:
    """Reads, checks and publishes within the call: 201 means it can be used."""
    principal, parts, call = principal_of(request), parts_of(request), call_of(request.scope)
    with parts.blobs.staged() as weights:
        upload = await read_upload(call, weights, principal.adapter_limits.max_adapter_bytes)
        version = await parts.adapters.publish(principal, upload, weights)
    return Response(_version(version), status_code=201)


@get("/v1/adapters", opt=needs("adapters:read"))
async def list_adapters(request: Request) -> dict[str, Any]:
    versions = await parts_of(request).adapters.current(principal_of(request))
    return {"object": "list", "data": [_version(version) for version in versions]}


@get("/v1/adapters/{name:str}", opt=needs("adapters:read"))
async def get_adapter(request: Request, name: FromPath[str]) -> dict[str, Any]:
    current, versions = await parts_of(request).adapters.versions(principal_of(request), name)
    return _version(current) | {"versions": [_version(version) for version in versions]}


@post("/v1/adapters/{name:str}/rollback", status_code=200, opt=needs("adapters:write"))
async def rollback_adapter(request: Request, name: FromPath[str]) -> dict[str, Any]:
    principal = principal_of(request)
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), Rollback)
    return _version(await parts_of(request).adapters.rollback(principal, name, body.version))


@delete("/v1/adapters/{name:str}", status_code=200, opt=needs("adapters:write"))
async def delete_adapter(request: Request, name: FromPath[str]) -> dict[str, Any]:
    await parts_of(request).adapters.delete(principal_of(request), name)
    return {"id": name, "object": "adapter", "deleted": True}


def _version(version: AdapterVersion) -> dict[str, Any]:
    return {
        "id": version.adapter_version_id,
        "object": "adapter",
        "name": version.name,
        "version": version.version,
        "sha256": version.sha256,
        "base_model": version.base_model,
        "lora_rank": version.lora_rank,
        "target_modules": version.target_modules,
        "num_pairs_bound": version.num_pairs,
        "size_bytes": version.size_bytes,
        "status": "ready",
        "warnings": version.warnings,
        "created_at": version.created_unix_ns // 1_000_000_000,
    }


handlers = [upload_adapter, list_adapters, get_adapter, rollback_adapter, delete_adapter]
