"""What a request's ``model`` means: a served base model, or the caller's own adapter on one."""

import asyncio
import re
from collections import OrderedDict
from dataclasses import dataclass

from engine.client import AdapterFile
from gateway.errors import model_not_found
from gateway.models import Catalog, ServedModel
from tenants.adapters.blobs import BlobStore
from tenants.adapters.repository import AdapterRepository
from tenants.database import Database
from tenants.directory import Principal
from tenants.secrets import Secrets
from tenants.tables import AdapterVersion

ADAPTER_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
_REFERENCE = re.compile(rf"(?P<name>{ADAPTER_NAME.pattern})(?:@(?P<version>[1-9][0-9]{{0,8}}))?")
_MAX_KNOWN_KEYS = 65_536  # engines ask for adapters by key within seconds of a request that names one


@dataclass(frozen=True, slots=True)
class Target:
    """``name`` is as the caller wrote it; ``adapter`` None and ``adapter_key`` '' are the base model itself."""

    name: str
    model: ServedModel
    adapter: AdapterVersion | None = None
    adapter_key: str = ""

    @property
    def adapter_sha256(self) -> str:
        return self.adapter.sha256 if self.adapter else ""

    @property
    def adapter_version_id(self) -> str:
        return self.adapter.adapter_version_id if self.adapter else ""


class Targets:
    """Resolves names at every request, so that a deleted or moved alias is seen at once; finds adapters' files."""

    def __init__(self, catalog: Catalog, database: Database, secrets: Secrets, blobs: BlobStore) -> None:
        self._catalog = catalog
        self._database = database
        self._secrets = secrets
        self._blobs = blobs
        self._known: OrderedDict[str, tuple[str, str, int]] = OrderedDict()

    async def resolve(self, principal: Principal, name: str) -> Target:
        """Raises ApiError 404: one answer for what nobody has and for what another tenant has."""
        base = self._catalog.get(name)
        if base is not None:
            return Target(name, base)
        reference = _REFERENCE.fullmatch(name)
        if reference is None:
            raise model_not_found(name)
        version = int(reference["version"]) if reference["version"] else None
        async with self._database.session() as session:
            adapter = await AdapterRepository(session).resolve(principal.tenant_id, reference["name"], version)
        model = self._catalog.get(adapter.base_model) if adapter else None
        if adapter is None or model is None:
            raise model_not_found(name)
        return Target(name, model, adapter, self._remember(adapter))

    def key_of(self, tenant_id: str, sha256: str) -> str:
        """What engines call a tenant's adapter."""
        return self._secrets.adapter_key(tenant_id, sha256)

    def _remember(self, adapter: AdapterVersion) -> str:
        key = self.key_of(adapter.tenant_id, adapter.sha256)
        self._known[key] = (adapter.tenant_id, adapter.sha256, adapter.size_bytes)
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN_KEYS:
            self._known.popitem(last=False)
        return key

    async def file(self, adapter_key: str) -> AdapterFile | None:
        """The file that an engine asks for; None when no request named it lately, or it is deleted. A live
        version's file that isn't there is given all the same: whoever opens it finds the damage."""
        known = self._known.get(adapter_key)
        if known is None:
            return None
        tenant_id, sha256, size_bytes = known
        path = await asyncio.to_thread(self._blobs.path, tenant_id, sha256)
        if path is None:
            async with self._database.session() as session:
                if not await AdapterRepository(session).is_used(tenant_id, sha256):
                    return None
        return AdapterFile(path or self._blobs.place(tenant_id, sha256), sha256, size_bytes)
