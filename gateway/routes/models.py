"""GET /v1/models: the base models and the caller's own adapters."""

from pathlib import Path

from litestar import Request, get
from litestar.params import FromPath
from msgspec import UNSET

from gateway.access import needs_any_key
from gateway.errors import ApiError
from gateway.parts import Parts, parts_of, principal_of
from gateway.resources import Listed, ModelBody
from gateway.targets import Target
from tenants.adapters.repository import AdapterRepository
from tenants.tables import AdapterVersion


@get("/v1/models", opt=needs_any_key())
async def list_models(request: Request) -> Listed[ModelBody]:
    principal, parts = principal_of(request), parts_of(request)
    async with parts.database.session() as session:
        adapters = await AdapterRepository(session).list_current(principal.tenant_id)
    bases = [_base(name, parts) for name in parts.catalog.models]
    own = [_adapter(adapter.name, adapter) for adapter in adapters if parts.catalog.get(adapter.base_model)]
    return Listed(data=bases + own)


@get("/v1/models/{model_id:path}", opt=needs_any_key())
async def get_model(request: Request, model_id: FromPath[Path]) -> ModelBody:
    """Raises ApiError 404, the same for absent and for another tenant's."""
    principal, parts = principal_of(request), parts_of(request)
    name = str(model_id).removeprefix("/")
    target: Target = await parts.targets.resolve(principal, name)
    return _base(name, parts) if target.adapter is None else _adapter(name, target.adapter)


def _base(name: str, parts: Parts) -> ModelBody:
    try:
        longest = parts.catalog.models[name].text().card.context_tokens
    except ApiError:  # no engine of it has been seen yet
        longest = UNSET
    return ModelBody(id=name, created=parts.started_unix_s, owned_by="tenora", max_model_len=longest)


def _adapter(name: str, adapter: AdapterVersion) -> ModelBody:
    created = adapter.created_unix_ns // 1_000_000_000
    return ModelBody(id=name, created=created, owned_by="you", parent=adapter.base_model)


handlers = [list_models, get_model]
