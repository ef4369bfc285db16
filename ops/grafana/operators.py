"""The operator's dashboard: is it well, where does time go, what fills the device, what does it cost."""

from ops.grafana.panels import Dashboard, Panel, Query, Row, Variable

QUANTILES = (0.5, 0.95, 0.99)
ROUTE = 'model=~"$model",class=~"$class"'
MODEL = 'model=~"$model"'
_R = "[$__rate_interval]"


def quantiles(metric: str, labels: str, *, exemplars: bool = True) -> tuple[Query, ...]:
    """P50, P95 and P99 of a histogram; the exemplars are told once."""
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{labels}}}{_R})))",
            f"P{q * 100:.0f}",
            exemplars and q == QUANTILES[-1],
        )
        for q in QUANTILES
    )


def p95_by(metric: str, by: str, labels: str) -> Query:
    expr = f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric}_bucket{{{labels}}}{_R})))"
    return Query(expr, " ".join(f"{{{{{name}}}}}" for name in by.split(", ")))


def rate(metric: str, by: str, labels: str) -> Query:
    expr = f"sum by ({by}) (rate({metric}{{{labels}}}{_R}))"
    return Query(expr, " ".join(f"{{{{{name}}}}}" for name in by.split(", ")))


def level(metric: str, by: str, labels: str) -> Query:
    return Query(f"sum by ({by}) ({metric}{{{labels}}})", " ".join(f"{{{{{name}}}}}" for name in by.split(", ")))


def mean(metric: str, by: str, labels: str) -> Query:
    parts = (f"sum by ({by}) (rate({metric}_{part}{{{labels}}}{_R}))" for part in ("sum", "count"))
    return Query(" / ".join(parts), f"mean, {{{{{by}}}}}")


REQUESTS = Row(
    "Requests",
    (
        Panel("Requests by outcome", (rate("tenora_requests_total", "outcome", ROUTE),), "reqps", stacked=True),
        Panel("Refusals by reason", (rate("tenora_admission_refusals_total", "reason", ""),), "reqps"),
        Panel("Tokens by kind", (rate("tenora_tokens_total", "kind", ""),), "short"),
        Panel("Queue depth by class", (level("tenora_queue_depth", "class", ROUTE),)),
        Panel(
            "Running and waiting",
            (
                Query(f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
            ),
        ),
        Panel("Fallbacks by kind and reason", (rate("tenora_fallbacks_total", "kind, reason", ""),), "ops"),
    ),
)
LATENCY = Row(
    "Latency (points are requests: their traces)",
    (
        Panel("TTFT P50, P95, P99", quantiles("tenora_time_to_first_token_seconds", ROUTE), "s"),
        Panel("TPOT P50, P95, P99", quantiles("tenora_time_per_output_token_seconds", ROUTE), "s"),
        Panel("Whole requests P50, P95, P99", quantiles("tenora_request_seconds", ROUTE), "s"),
        Panel("Phases, mean", (mean("tenora_request_phase_seconds", "phase", ""),), "s", stacked=True),
        Panel("Phases P95", (p95_by("tenora_request_phase_seconds", "phase", ""),), "s"),
        Panel(
            "TTFT P95 by model, class and route",
            (p95_by("tenora_time_to_first_token_seconds", "model, class, route", ROUTE),),
            "s",
        ),
        Panel(
            "TPOT P95 by model, class and route",
            (p95_by("tenora_time_per_output_token_seconds", "model, class, route", ROUTE),),
            "s",
        ),
        Panel(
            "Requests P95 by model, class and route",
            (p95_by("tenora_request_seconds", "model, class, route", ROUTE),),
            "s",
        ),
    ),
)
_SLO = 'model=~"$model",class=~"$class",objective=~"$objective"'
SLO = Row(
    "Objectives",
    (
        Panel("Burn, one hour (14.4 pages)", (level("tenora:slo_burn:rate1h", "objective, model, class", _SLO),)),
        Panel("Burn, six hours (6 pages)", (level("tenora:slo_burn:rate6h", "objective, model, class", _SLO),)),
        Panel("Burn, three days (1 asks)", (level("tenora:slo_burn:rate3d", "objective, model, class", _SLO),)),
        Panel(
            "Attainment",
            (
                Query(
                    f'sum by (objective) (rate(tenora_slo_requests_total{{result="good",{_SLO}}}{_R}))'
                    f" / sum by (objective) (rate(tenora_slo_requests_total{{{_SLO}}}{_R}))",
                    "{{objective}}",
                ),
            ),
            "percentunit",
        ),
        Panel("Promised requests", (rate("tenora_slo_requests_total", "objective, result", _SLO),), "reqps"),
    ),
)
DEVICE = Row(
    "Device",
    (
        Panel("Utilization (busy / wall)", (level("tenora_gpu_utilization_ratio", "model", MODEL),), "percentunit"),
        Panel("Memory bandwidth", (level("tenora_memory_bandwidth_ratio", "model", MODEL),), "percentunit"),
        Panel("Time by account", (rate("tenora_gpu_seconds_total", "account", MODEL),), "percentunit", stacked=True),
        Panel("Time by phase", (rate("tenora_phase_gpu_seconds_total", "phase", MODEL),), "percentunit", stacked=True),
        Panel(
            "Time by op",
            (rate("tenora_kernel_seconds_total", "op", MODEL),),
            "percentunit",
            stacked=True,
            text="Of one step in 64: the shares count, not the sum.",
        ),
        Panel("Steps P95 by kind", (p95_by("tenora_step_seconds", "kind", MODEL),), "s"),
        Panel(
            "Sequences of a step P50, P95, P99", quantiles("tenora_batch_sequences", MODEL, exemplars=False), "short"
        ),
        Panel("Tokens of a step P95 by phase", (p95_by("tenora_batch_tokens", "phase", MODEL),)),
        Panel("Steps by shape", (rate("tenora_batch_shape_total", "bucket", MODEL),), "ops", stacked=True),
        Panel("Exchange between devices P95", (p95_by("tenora_collective_seconds", "model", MODEL),), "s"),
    ),
)
MEMORY = Row(
    "KV cache",
    (
        Panel("Blocks by state", (level("tenora_kv_blocks", "state", MODEL),), stacked=True),
        Panel("Blocks in use by class", (level("tenora_kv_blocks_in_use", "class", ROUTE),), stacked=True),
        Panel("Used part", (level("vllm:kv_cache_usage_perc", "model", MODEL),), "percentunit"),
        Panel("Fragmentation", (level("tenora_kv_fragmentation_ratio", "model", MODEL),), "percentunit"),
        Panel(
            "Prefix cache hit ratio",
            (
                Query(
                    f'sum by (model) (rate(tenora_prefix_cache_tokens_total{{result="hit",{MODEL}}}{_R}))'
                    f" / sum by (model) (rate(tenora_prefix_cache_tokens_total{{{MODEL}}}{_R}))",
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
        Panel("Blocks reused", (rate("tenora_kv_block_reuse_total", "model", MODEL),), "ops"),
        Panel("Preemptions", (rate("tenora_preemptions_total", "model", MODEL),), "ops"),
    ),
)
ADAPTERS = Row(
    "Adapters and experts",
    (
        Panel("Adapters by tier", (level("tenora_adapters_resident", "tier", MODEL),)),
        Panel("Slots by state", (level("tenora_adapter_slots", "state", MODEL),), stacked=True),
        Panel("Adapter loads", (rate("tenora_adapter_load_seconds_count", "model", MODEL),), "ops"),
        Panel("Adapter load P95", (p95_by("tenora_adapter_load_seconds", "model", MODEL),), "s"),
        Panel(
            "Adapters in use",
            (Query(f"vllm:lora_requests_info{{{MODEL}}}", "{{running_lora_adapters}}"),),
            "dateTimeAsIso",
            "table",
        ),
        Panel("Balancedness of experts", (level("tenora_expert_balancedness", "model", MODEL),), "percentunit"),
        Panel(
            "Busiest experts",
            (
                Query(
                    f"topk(10, sum by (model, layer, expert) (rate(tenora_expert_tokens_total{{{MODEL}}}{_R})))",
                    "{{model}} layer {{layer}} expert {{expert}}",
                ),
            ),
        ),
    ),
)
COST = Row(
    "Cost and price",
    (
        Panel(
            "Device time by model, class and route",
            (rate("tenora_request_gpu_seconds_total", "model, class, route", ROUTE),),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Price by model, class and route",
            (rate("tenora_request_price_usd_total", "model, class, route", ROUTE),),
            "currencyUSD",
            text="Dollars a second.",
        ),
        Panel(
            "Price of a device second",
            (
                Query(
                    f"sum by (model, route) (rate(tenora_request_price_usd_total{{{ROUTE}}}{_R}))"
                    f" / sum by (model, route) (rate(tenora_request_gpu_seconds_total{{{ROUTE}}}{_R}))",
                    "{{model}} {{route}}",
                ),
            ),
            "currencyUSD",
        ),
        Panel("Busiest tenants, device time", (rate("tenora_tenant_gpu_seconds_total", "tenant", ""),), "percentunit"),
        Panel("Busiest tenants, price", (rate("tenora_tenant_price_usd_total", "tenant", ""),), "currencyUSD"),
        Panel("Cost of lost requests", (rate("tenora_lost_request_gpu_seconds_total", "model", MODEL),), "percentunit"),
        Panel("Error of the cost model", (level("tenora_cost_model_error_ratio", "model", MODEL),), "percentunit"),
    ),
)
HEALTH = Row(
    "Health",
    (
        Panel("Usage records no ledger has", (level("tenora_usage_records_unacked", "model", MODEL),)),
        Panel("Records wait, none is acknowledged", (level("tenora_usage_stalled_seconds", "model", MODEL),), "s"),
        Panel("Journals that fail", (level("tenora_usage_journal_failing", "model", MODEL),)),
        Panel("Records not booked", (rate("tenora_records_unbooked_total", "reason", ""),), "ops"),
        Panel("Webhook deliveries by result", (rate("tenora_webhook_deliveries_total", "result", ""),), "ops"),
        Panel("Webhooks under way", (Query("sum(tenora_webhook_pending)", "pending"),)),
        Panel("Gateways without the store", (Query("max(tenora_store_away)", "away"),)),
        Panel("Gateways of each engine", (level("tenora_engine_gateways", "model", MODEL),)),
        Panel("Open requests", (level("tenora_engine_open_requests", "model", MODEL),)),
        Panel(
            "Spans dropped, requests not measured",
            (
                Query(f"sum(rate(tenora_spans_dropped_total{_R}))", "spans"),
                Query(f"sum(rate(tenora_reports_failed_total{_R}))", "requests"),
            ),
            "ops",
        ),
        Panel(
            "Grammars: time a mask, choices cut",
            (
                Query(
                    f"sum(rate(tenora_grammar_mask_seconds_total{{{MODEL}}}{_R}))"
                    f" / sum(rate(tenora_grammar_masks_total{{{MODEL}}}{_R}))",
                    "seconds a mask",
                ),
                rate("tenora_grammar_cut_total", "reason", MODEL),
            ),
        ),
    ),
)
OPERATOR = Dashboard(
    "tenora-operator",
    "Tenora: operator",
    (
        Variable("model", "tenora_step_seconds_count", "model"),
        Variable("class", "tenora_queue_depth", "class"),
        Variable("objective", "tenora_slo_requests_total", "objective"),
    ),
    (REQUESTS, LATENCY, SLO, DEVICE, MEMORY, ADAPTERS, COST, HEALTH),
)
