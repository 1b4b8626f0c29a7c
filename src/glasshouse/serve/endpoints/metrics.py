"""The metrics of HTTP and of all models, as /metrics shows them."""

from __future__ import annotations

from collections.abc import Callable

from glasshouse.serve.api import Api
from glasshouse.serve.metrics import Histogram, ModelMetrics, Sample, exposition, gauge, label_text
from glasshouse.serve.runtime.runner import Lane

GAUGES: dict[str, tuple[str, Callable[[Lane], float]]] = {
    "requests_running": ("Sequences that have a slot, or are about to get one.", lambda lane: len(lane.active)),
    "requests_waiting": (
        "Sequences in the queue.",
        lambda lane: len(lane.queue) + len(lane.retries),
    ),
    "slots": ("Sequences that can run at once.", lambda lane: len(lane.engine.slots)),
    "kv_cache_usage_ratio": ("Share of the KV cache that running sequences fill.", lambda lane: cache_usage(lane)),
    "engine_failures": ("Steps that raised in a row.", lambda lane: lane.failures),
}
COUNTERS: dict[str, tuple[str, Callable[[Lane], float]]] = {
    "prompt_tokens_total": ("Prompt tokens of finished sequences.", lambda lane: lane.metrics.prompt_tokens),
    "generation_tokens_total": (
        "Generated tokens of finished sequences.",
        lambda lane: lane.metrics.generation_tokens,
    ),
    "prefix_cache_hit_tokens_total": (
        "Prompt tokens copied from the KV cache instead of computed.",
        lambda lane: lane.engine.slots.n_reused,
    ),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[ModelMetrics], Histogram]]] = {
    "time_to_first_token_seconds": ("From a request to its first token.", lambda one: one.time_to_first_token),
    "time_per_output_token_seconds": (
        "Between two tokens, on average over a sequence.",
        lambda one: one.time_per_output_token,
    ),
    "request_duration_seconds": ("From a request to its last token.", lambda one: one.request_duration),
}


def cache_usage(lane: Lane) -> float:
    """Return the share of the KV cache that running sequences fill."""
    used = sum(seq.n_cached for seq in list(lane.engine.slots.running))
    return used / (len(lane.engine.slots) * lane.engine.max_len)


def metrics_text(api: Api) -> str:
    """Return the metrics in Prometheus' text format."""
    lanes = api.runner.lanes
    samples: list[Sample] = []
    for table, kind in ((GAUGES, "gauge"), (COUNTERS, "counter")):
        for metric, (text, read) in table.items():
            lines = [gauge(metric, {"model": name}, read(lane)) for name, lane in lanes.items()]
            samples.append((metric, kind, text, lines))
    reasons = [
        gauge("requests_finished_total", {"model": name, "finish_reason": reason}, count)
        for name, lane in lanes.items()
        for reason, count in sorted(lane.metrics.finish_reasons.items())
    ]
    samples.append(("requests_finished_total", "counter", "Sequences by the reason of their end.", reasons))
    fired = [
        gauge("probe_rules_fired_total", {"model": name, "probe": probe, "then": then}, count)
        for name, lane in lanes.items()
        for (probe, then), count in sorted(lane.metrics.rules_fired.items())
    ]
    samples.append(("probe_rules_fired_total", "counter", "Times that a rule on a probe's scores fired.", fired))
    requests = [
        gauge("http_requests_total", {"route": one.route, "method": one.method, "status": str(one.status)}, count)
        for one, count in sorted(api.http_counts.items())
    ]
    samples.append(("http_requests_total", "counter", "HTTP requests by route, method and status.", requests))
    for metric, (text, find) in HISTOGRAMS.items():
        lines = [
            line
            for name, lane in lanes.items()
            for line in find(lane.metrics).lines(metric, label_text({"model": name}))
        ]
        samples.append((metric, "histogram", text, lines))
    return exposition(samples)
