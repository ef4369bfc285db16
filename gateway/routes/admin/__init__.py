"""/admin/v1: tenants, keys, operators, the audit log, machines, money and service levels, for operators' keys.

Scopes: ``read`` looks at everything but money, ``billing`` at money, ``admin`` may do all. Every change leaves an
audit event and is in force at every gateway within a second.
"""

from litestar import Router

from gateway.routes.admin.audit import Audit
from gateway.routes.admin.cost_report import CostReport
from gateway.routes.admin.credit import Credit
from gateway.routes.admin.exports import Exports
from gateway.routes.admin.invoices import Invoices
from gateway.routes.admin.keys import Keys, TenantKeys
from gateway.routes.admin.machines import Machines
from gateway.routes.admin.money import Money
from gateway.routes.admin.operators import Operators
from gateway.routes.admin.rate_cards import RateCards
from gateway.routes.admin.rollups import Rollups
from gateway.routes.admin.set_aside import SetAside
from gateway.routes.admin.slo import SloObjectives, SloReports
from gateway.routes.admin.tenants import Tenants
from gateway.routes.admin.usage_reports import UsageReports
from gateway.routes.admin.webhooks import Webhooks


def admin_routes() -> Router:
    """Everything under /admin/v1."""
    handlers = [
        *(Tenants, Credit, TenantKeys, Keys, Operators, Audit, Machines, SetAside),
        *(Money, RateCards, Invoices, Exports, Webhooks, SloObjectives, SloReports, CostReport, UsageReports, Rollups),
    ]
    return Router("/admin/v1", route_handlers=handlers)
