"""One tenant's dashboard, as far as metrics tell tenants apart: the busiest ones. The books are exact for all."""

from ops.grafana.operators import rate
from ops.grafana.panels import Dashboard, Panel, Query, Row, Variable

TENANT_LABEL = 'tenant="$tenant"'
_R = "[$__rate_interval]"
NOTE = """**What is exact, and for every tenant**: the SLO report `/admin/v1/reports/slo?tenant=$tenant`, its invoices
and ledger (`tenora report slo`, `tenora report usage`, `tenora invoice show`). These panels show the busiest tenants of
each gateway process only; all others are `other`."""


def _share(metric: str) -> Query:
    return Query(f"sum(rate({metric}{{{TENANT_LABEL}}}{_R})) / sum(rate({metric}{_R}))", "share of all")


TENANT = Dashboard(
    "tenora-tenant",
    "Tenora: tenant",
    (Variable("tenant", "tenora_tenant_requests_total", "tenant", multi=False),),
    (
        Row("This tenant", (Panel("Where the books are", (), kind="text", width=24, text=NOTE),)),
        Row(
            "Use",
            (
                Panel(
                    "Requests by outcome",
                    (rate("tenora_tenant_requests_total", "outcome", TENANT_LABEL),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Part that was answered",
                    (
                        Query(
                            f'sum(rate(tenora_tenant_requests_total{{outcome="200",{TENANT_LABEL}}}{_R}))'
                            f" / sum(rate(tenora_tenant_requests_total{{{TENANT_LABEL}}}{_R}))",
                            "200",
                        ),
                    ),
                    "percentunit",
                ),
                Panel("Tokens by kind", (rate("tenora_tenant_tokens_total", "kind", TENANT_LABEL),)),
                Panel(
                    "Prompt tokens from the cache",
                    (
                        Query(
                            f'sum(rate(tenora_tenant_tokens_total{{kind="cached",{TENANT_LABEL}}}{_R}))'
                            f' / sum(rate(tenora_tenant_tokens_total{{kind="input",{TENANT_LABEL}}}{_R}))',
                            "cached",
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Cost and price",
            (
                Panel("Device time", (rate("tenora_tenant_gpu_seconds_total", "tenant", TENANT_LABEL),), "percentunit"),
                Panel("Share of the device time", (_share("tenora_tenant_gpu_seconds_total"),), "percentunit"),
                Panel(
                    "Price a second", (rate("tenora_tenant_price_usd_total", "tenant", TENANT_LABEL),), "currencyUSD"
                ),
                Panel(
                    "Price in the time shown",
                    (Query(f"sum(increase(tenora_tenant_price_usd_total{{{TENANT_LABEL}}}[$__range]))", "USD"),),
                    "currencyUSD",
                    "stat",
                ),
                Panel(
                    "Price of a device second",
                    (
                        Query(
                            f"sum(rate(tenora_tenant_price_usd_total{{{TENANT_LABEL}}}{_R}))"
                            f" / sum(rate(tenora_tenant_gpu_seconds_total{{{TENANT_LABEL}}}{_R}))",
                            "USD",
                        ),
                    ),
                    "currencyUSD",
                ),
            ),
        ),
    ),
)
