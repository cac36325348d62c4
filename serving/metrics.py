"""`/metrics`: an engine's counters for Prometheus, and those of the process."""

import itertools
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from keepsight.serving.engine import Engine, Histogram

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were read.",
    "cached_tokens": "Tokens of prompts that were not read, as a session had read them.",
    "kept_entries": "Entries that each KV head keeps of the prompts, on average.",
    "generated_tokens": "Tokens of answers.",
    "decode_steps": "Decoding steps, each for a token of every running answer.",
    "decode_seconds": "Seconds of decoding steps.",
    "prefill_seconds": "Seconds in which prompts were read and evicted from.",
}


class EngineMetrics(Collector):
    """Metrics of an engine; `refused` counts refused requests by HTTP status."""

    def __init__(self, engine: Engine, refused: Mapping[int, int]) -> None:
        self.engine = engine
        self.refused = refused

    @override
    def collect(self) -> Iterable[Metric]:
        totals = self.engine.totals
        running, waiting = self.engine.load
        yield GaugeMetricFamily("keepsight_running", "Answers that are decoded.", running)
        yield GaugeMetricFamily("keepsight_waiting", "Requests that wait for their turn.", waiting)
        yield GaugeMetricFamily("keepsight_kv_bytes", "Bytes of the batch's keys and values.", self.engine.kv_bytes)
        sessions = self.engine.sessions
        yield GaugeMetricFamily("keepsight_sessions", "Answered prompts that are kept for later turns.", len(sessions))
        yield GaugeMetricFamily("keepsight_session_bytes", "Bytes that they take.", sessions.nbytes)
        ended = CounterMetricFamily("keepsight_requests", "Requests that have ended.", labels=["reason"])
        for reason, count in totals.ended.items():
            ended.add_metric([reason], count)
        yield ended
        refused = CounterMetricFamily("keepsight_refused", "Requests that were refused.", labels=["status"])
        for status, count in self.refused.items():
            refused.add_metric([str(status)], count)
        yield refused
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"keepsight_{name}", text, getattr(totals, name))
        yield _histogram(
            "keepsight_queue_time_seconds",
            "Seconds from a request's arrival to the start of its prefill.",
            totals.queue,
        )
        yield _histogram(
            "keepsight_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            totals.first_token,
        )
        yield _histogram(
            "keepsight_time_between_tokens_seconds",
            "Seconds between two tokens of an answer.",
            totals.between_tokens,
        )


def registry_of(engine: Engine, refused: Mapping[int, int]) -> CollectorRegistry:
    """The metrics of an engine and of this process."""
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine, refused))
    ProcessCollector(registry=registry)
    return registry


def _histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = [*zip(bounds, itertools.accumulate(values.counts), strict=True)]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=values.sum)
