"""What the gateway does with tenants' adapters: publish an upload, move a name, delete. HTTP is routes/adapters.py.

Disk and database agree by two rules: a blob is there before the row that names it is committed, and it is unlinked
only under the tenant's lock, when no live row names it. A crash in between leaves a blob that ``sweep.py``
collects. No bytes are written or hashed while the database is held: under that lock a file is looked for, or unlinked.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.adapters.check import Checked, HeaderJob, Job, check, check_header, disk_may_be_full
from gateway.adapters.upload import CONFIG, WEIGHTS
from gateway.errors import ApiError, invalid, invalid_key, model_not_found
from gateway.models import Catalog, ServedModel
from gateway.resources import Residency
from gateway.targets import ADAPTER_NAME, Targets
from tenants.adapters.blobs import BlobStore
from tenants.adapters.repository import AdapterRepository, NewVersion
from tenants.database import Database
from tenants.directory import Principal
from tenants.errors import LimitExceeded, NotFound, VersionConflict
from tenants.events import emit
from tenants.tables import AdapterVersion

RESIDENCY_TIMEOUT_S = 1.0
MAX_UPLOADS_AT_ONCE = 4  # of one tenant at one gateway: bounds what is on its way to the disk
_log = logging.getLogger("gateway.adapters")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An upload, whole: what it wants to be, and where its weights lie. ``expected_version`` None: whatever it is."""

    name: str
    base_model: str
    config: bytes
    weights: Path
    expected_version: int | None = None


@dataclass(frozen=True, slots=True)
class Adapters:
    catalog: Catalog
    targets: Targets
    database: Database
    blobs: BlobStore
    _uploading: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def uploading(self, principal: Principal) -> Iterator[None]:
        """An upload is on its way, or being checked. Raises ApiError 429 when the tenant has too many."""
        tenant_id = principal.tenant_id
        if self._uploading[tenant_id] >= MAX_UPLOADS_AT_ONCE:
            message = f"At most {MAX_UPLOADS_AT_ONCE} uploads at a time; one of yours must end first."
            raise ApiError(message, code="rate_limit_exceeded", retry_ms=1000)
        self._uploading[tenant_id] += 1
        try:
            yield
        finally:
            self._uploading[tenant_id] -= 1
            if not self._uploading[tenant_id]:
                del self._uploading[tenant_id]

    @contextlib.contextmanager
    def staging(self, principal: Principal) -> Iterator[Path]:
        """``uploading``, with a staged file for what comes. Raises ApiError 429, OSError."""
        with self.uploading(principal), self.blobs.staged() as path:
            yield path

    def check_name(self, name: str) -> None:
        """Whether an adapter may have it. Raises ApiError 400, 409."""
        if self.catalog.get(name) is not None:
            raise ApiError(f"'{name}' is the name of a served model.", code="name_taken", param="name")
        if not ADAPTER_NAME.fullmatch(name):
            raise invalid("'name' is 1 to 64 of A-Z a-z 0-9 . _ - and does not begin with a dot.", "name")

    async def look_at_header(self, principal: Principal, weights: Path, file_bytes: int | None) -> None:
        """Whether any served model can take weights that begin so. Raises ApiError 422."""
        bases = [
            self._job(principal, model, b"", weights, weights)
            for model in self.catalog.models.values()
            if model.connected()
        ]
        if bases:
            await check_header(HeaderJob(str(weights), file_bytes, bases))

    async def publish(self, principal: Principal, candidate: Candidate) -> AdapterVersion:
        """Checks the upload and makes it the name's next version. Raises ApiError 400, 404, 409, 422, 507."""
        self.check_name(candidate.name)
        base = self._base_of(candidate)
        while True:
            with disk_may_be_full(), self.blobs.staged() as canonical:
                found = await check(self._job(principal, base, candidate.config, candidate.weights, canonical))
                await asyncio.to_thread(self.blobs.publish, principal.tenant_id, found.sha256, canonical)
            with contextlib.suppress(FileNotFoundError):
                return await self._enter(principal, candidate, _new(found, base))

    async def _enter(self, principal: Principal, candidate: Candidate, fields: NewVersion) -> AdapterVersion:
        """The row of a blob that is published. Raises ApiError 409; FileNotFoundError when a deletion of equal bytes
        has taken the blob meanwhile."""
        tenant_id = principal.tenant_id
        try:
            async with self.database.transaction() as session:
                repository = AdapterRepository(session)
                version = await repository.publish(tenant_id, candidate.name, fields, candidate.expected_version)
                await emit(session, tenant_id, "adapter.ready", told(version))
                if await asyncio.to_thread(self.blobs.path, tenant_id, fields.sha256) is None:
                    raise FileNotFoundError(fields.sha256)
                return version
        except VersionConflict as error:
            refused = ApiError(f"The adapter {error}.", code="version_conflict", param="expected_version")
        except LimitExceeded as error:
            refused = ApiError(f"This account's limit is reached: {error}.", code="limit_reached")
        except NotFound:  # the account was deleted meanwhile
            refused = invalid_key()
        await self.collect(tenant_id, [fields.sha256])
        raise refused

    async def rollback(
        self, principal: Principal, name: str, version: int, expected_version: int | None
    ) -> AdapterVersion:
        """Moves the name back. Raises ApiError 404, 409."""
        try:
            async with self.database.transaction() as session:
                repository = AdapterRepository(session)
                return await repository.rollback(principal.tenant_id, name, version, expected_version)
        except NotFound:
            raise not_found(name) from None
        except VersionConflict as error:
            raise ApiError(f"The adapter {error}.", code="version_conflict", param="expected_version") from None

    async def versions(self, principal: Principal, name: str) -> tuple[AdapterVersion, list[AdapterVersion]]:
        """The current version and all live ones. Raises ApiError 404."""
        async with self.database.session() as session:
            repository = AdapterRepository(session)
            current = await repository.resolve(principal.tenant_id, name)
            if current is None:
                raise not_found(name)
            return current, await repository.versions(principal.tenant_id, name)

    async def residency(self, versions: list[AdapterVersion]) -> dict[str, list[Residency]]:
        """By sha256: each engine of the base model that answers, with the tiers that hold the weights there."""
        keys = {version.sha256: self.targets.key_of(version.tenant_id, version.sha256) for version in versions}
        found: dict[str, list[Residency]] = {sha256: [] for sha256 in keys}
        bases = filter(None, (self.catalog.get(name) for name in {version.base_model for version in versions}))
        engines = [engine for model in bases for engine in model.connected()]
        asked = [engine.residency(list(keys.values()), RESIDENCY_TIMEOUT_S) for engine in engines]
        for engine, tiers in zip(engines, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(tiers, BaseException) or engine.welcome is None:  # it is busy, or has just gone
                continue
            for sha256, key in keys.items():
                found[sha256].append(Residency(engine.welcome.engine_id, tiers.get(key, [])))
        return found

    async def current(self, principal: Principal) -> list[AdapterVersion]:
        async with self.database.session() as session:
            return await AdapterRepository(session).list_current(principal.tenant_id)

    async def delete(self, principal: Principal, name: str) -> None:
        """The name is gone at once, and all its versions; what engines have accepted finishes. Raises ApiError 404."""
        try:
            async with self.database.transaction() as session:
                doomed = await AdapterRepository(session).delete(principal.tenant_id, name)
                gone = {"name": name, "version": None, "num_versions": len(doomed)}
                await emit(session, principal.tenant_id, "adapter.deleted", gone)
        except NotFound:
            raise not_found(name) from None
        await self.collect(principal.tenant_id, {version.sha256 for version in doomed})

    async def delete_version(self, principal: Principal, name: str, version: int) -> None:
        """One version that the name no longer means. Raises ApiError 404, 409."""
        try:
            async with self.database.transaction() as session:
                doomed = await AdapterRepository(session).delete_version(principal.tenant_id, name, version)
                gone = {"name": name, "version": version, "num_versions": 1}
                await emit(session, principal.tenant_id, "adapter.deleted", gone)
        except NotFound:
            raise not_found(f"{name}@{version}") from None
        except VersionConflict:
            message = f"'{name}' means version {version} now: roll back or upload another first, or delete the name."
            raise ApiError(message, code="version_conflict", param="name") from None
        await self.collect(principal.tenant_id, [doomed.sha256])

    async def collect(self, tenant_id: str, hashes: Collection[str]) -> None:
        """Frees those that no live version has, on disk and at the engines; a disk that fails is left to the sweep."""
        async with self.database.transaction() as session:
            for sha256 in await AdapterRepository(session).unused(tenant_id, hashes):
                self.forget(self.targets.key_of(tenant_id, sha256))
                try:
                    await asyncio.to_thread(self.blobs.delete, tenant_id, sha256)
                except OSError as error:
                    _log.error("a blob could not be removed: %s", error.strerror)

    def forget(self, adapter_key: str) -> None:
        """Tells every engine: what uses it still finishes, then no tier has it."""
        self.catalog.each_engine(lambda engine: engine.forget_adapter(adapter_key))

    def _base_of(self, candidate: Candidate) -> ServedModel:
        if not candidate.base_model:
            raise invalid("'base_model' is required.", "base_model")
        base = self.catalog.get(candidate.base_model)
        if base is None:
            error = model_not_found(candidate.base_model)
            error.param = "base_model"
            raise error
        for part, given in ((CONFIG, candidate.config), (WEIGHTS, _size(candidate.weights))):
            if not given:
                raise invalid(f"'{part}' is required.", part)
        return base

    def _job(self, principal: Principal, base: ServedModel, config: bytes, weights: Path, out: Path) -> Job:
        card, limits = base.text().card, principal.adapter_limits
        return Job(
            config=config,
            weights=str(weights),
            out=str(out),
            modules=card.modules,
            num_layers=card.num_layers,
            max_lora_rank=card.max_lora_rank,
            served_models=[base.name],
            max_adapter_rank=limits.max_adapter_rank,
            max_adapter_bytes=limits.max_adapter_bytes,
            experts=card.experts,
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def not_found(name: str) -> ApiError:
    """404: the same for absent and for another tenant's."""
    return ApiError(f"The adapter `{name}` does not exist.", code="not_found", param="name")


def told(version: AdapterVersion) -> dict[str, Any]:
    """What events say of a version, and answers with more."""
    return {
        "id": version.adapter_version_id,
        "name": version.name,
        "version": version.version,
        "sha256": version.sha256,
        "base_model": version.base_model,
    }


def _new(found: Checked, base: ServedModel) -> NewVersion:
    return NewVersion(
        sha256=found.sha256,
        base_model=base.name,
        lora_rank=found.lora_rank,
        target_modules=found.target_modules,
        num_pairs=found.num_pairs,
        size_bytes=found.size_bytes,
        warnings=found.warnings,
    )
