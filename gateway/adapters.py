"""What the gateway does with tenants' adapters: publish an upload, move a name, delete. HTTP is routes/adapters.py."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from gateway.adapter_check import Checked, Job, check
from gateway.errors import ApiError, invalid, model_not_found
from gateway.models import Catalog, ServedModel
from gateway.targets import ADAPTER_NAME, Targets
from gateway.upload import CONFIG, WEIGHTS, Upload
from tenants.blobs import BlobStore
from tenants.database import Database
from tenants.directory import Principal
from tenants.errors import LimitExceeded, NotFound, VersionConflict
from tenants.repositories import AdapterRepository, NewVersion
from tenants.tables import AdapterVersion


@dataclass(frozen=True, slots=True)
class Adapters:
    catalog: Catalog
    targets: Targets
    database: Database
    blobs: BlobStore

    async def publish(self, principal: Principal, upload: Upload, weights: Path) -> AdapterVersion:
        """Checks the upload and makes it the name's next version. Raises ApiError 400, 404, 409, 422."""
        name, base, expected = self._read_fields(upload)
        with self.blobs.staged() as canonical:
            found = await check(self._job(principal, base, upload.config, weights, canonical))
            async with self.database.transaction() as session:
                version = await _publish(AdapterRepository(session), principal, name, _new(found, base), expected)
                # before the commit: a version never names bytes that aren't there
                await asyncio.to_thread(self.blobs.publish, principal.tenant_id, found.sha256, canonical)
        return version

    async def rollback(self, principal: Principal, name: str, version: int) -> AdapterVersion:
        """Moves the name back. Raises ApiError 404."""
        try:
            async with self.database.transaction() as session:
                return await AdapterRepository(session).rollback(principal.tenant_id, name, version)
        except NotFound:
            raise not_found(name) from None

    async def versions(self, principal: Principal, name: str) -> tuple[AdapterVersion, list[AdapterVersion]]:
        """The current version and all live ones. Raises ApiError 404."""
        async with self.database.session() as session:
            repository = AdapterRepository(session)
            current = await repository.resolve(principal.tenant_id, name)
            if current is None:
                raise not_found(name)
            return current, await repository.versions(principal.tenant_id, name)

    async def current(self, principal: Principal) -> list[AdapterVersion]:
        async with self.database.session() as session:
            return await AdapterRepository(session).list_current(principal.tenant_id)

    async def delete(self, principal: Principal, name: str) -> None:
        """The name is gone at once; engines forget its versions when nothing runs on them. Raises ApiError 404."""
        try:
            async with self.database.transaction() as session:
                doomed = await AdapterRepository(session).delete(principal.tenant_id, name)
        except NotFound:
            raise not_found(name) from None
        async with self.database.transaction() as session:
            for version in {version.sha256: version for version in doomed}.values():
                if not await AdapterRepository(session).is_used(principal.tenant_id, version.sha256):
                    await self._forget(version)

    async def _forget(self, version: AdapterVersion) -> None:
        key = self.targets.adapter_key(version)
        self.catalog.each_engine(lambda engine: engine.forget_adapter(key))
        await asyncio.to_thread(self.blobs.delete, version.tenant_id, version.sha256)

    def _read_fields(self, upload: Upload) -> tuple[str, ServedModel, int | None]:
        name = upload.fields.get("name", "")
        if self.catalog.get(name) is not None:
            raise ApiError(f"'{name}' is the name of a served model.", code="name_taken", param="name")
        if not ADAPTER_NAME.fullmatch(name):
            raise invalid("'name' is 1 to 64 of A-Z a-z 0-9 . _ - and does not begin with a dot.", "name")
        base_name = upload.fields.get("base_model", "")
        base = self.catalog.get(base_name)
        if not base_name:
            raise invalid("'base_model' is required.", "base_model")
        if base is None:
            error = model_not_found(base_name)
            error.param = "base_model"
            raise error
        for part, given in ((CONFIG, upload.config), (WEIGHTS, upload.weights_bytes)):
            if not given:
                raise invalid(f"'{part}' is required.", part)
        return name, base, _expected_version(upload.fields.get("expected_version"))

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


async def _publish(
    repository: AdapterRepository, principal: Principal, name: str, fields: NewVersion, expected: int | None
) -> AdapterVersion:
    try:
        return await repository.publish(principal.tenant_id, name, fields, expected)
    except VersionConflict as error:
        raise ApiError(f"The adapter {error}.", code="version_conflict", param="expected_version") from None
    except LimitExceeded as error:
        raise ApiError(f"This account's limit is reached: {error}.", code="limit_reached") from None


def not_found(name: str) -> ApiError:
    """404: the same for absent and for another tenant's."""
    return ApiError(f"The adapter `{name}` does not exist.", code="not_found", param="name")


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


def _expected_version(text: str | None) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid("'expected_version' is a whole number; 0 = the name must be new.", "expected_version")
    return int(text)
