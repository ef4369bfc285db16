"""What can go wrong in tenants/: each error is a fact about the world, never about HTTP."""


class TenantsError(Exception):
    """Base of every domain error of this package."""


class NotFound(TenantsError):
    """No such thing, or not this tenant's: the two are one answer."""


class NameTaken(TenantsError):
    """The name belongs to something else already."""


class LastAdministrator(TenantsError):
    """The only key that may administer is not to be revoked."""


class VersionConflict(TenantsError):
    """A compare-and-swap found another version (``found``; 0 = none) than the caller expected."""

    def __init__(self, name: str, expected: int, found: int) -> None:
        super().__init__(f"{name!r} is at version {found}, expected {expected}")
        self.expected = expected
        self.found = found


class LimitExceeded(TenantsError):
    """One of the tenant's own limits on what it may keep (``limit`` is the column's name)."""

    def __init__(self, limit: str, allowed: int) -> None:
        super().__init__(f"{limit} is {allowed}")
        self.limit = limit
        self.allowed = allowed


class InvalidValue(TenantsError):
    """A field of a tenant, key, limit or rate card that may not have this value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PeriodOpen(TenantsError):
    """The month is not over, or has only just ended: records of it may still come."""


class UnsoundInvoice(TenantsError):
    """What would be invoiced does not add up (``breaches``): nothing is issued until somebody has looked."""

    def __init__(self, breaches: list[str]) -> None:
        super().__init__("; ".join(breaches))
        self.breaches = breaches


class StoreUnavailable(TenantsError):
    """The shared store did not answer within its deadline. What was asked may or may not have happened."""


class SpendUnknown(TenantsError):
    """The store does not know what a tenant has spent: it lost it, or never counted it. Nothing was taken."""


class GrantDiffers(TenantsError):
    """The reference of a grant of credit has granted another amount before."""


class ReservationClosed(TenantsError):
    """The reservation was settled before this reserve arrived (a late duplicate): nothing was taken."""


class ForgedContext(TenantsError):
    """A request context whose MAC or shape is not ours."""


class InvalidRecord(TenantsError):
    """Quantities that no request can have; the record must not reach the ledger."""


class UnsafeSecrets(TenantsError):
    """The secrets file is readable by others, not ours, or not of a version we know."""
