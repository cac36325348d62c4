"""`/metrics`: an engine's counters for Prometheus, and those of the process."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from keepsight.serving.engine import Engine, Histogram

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were read.",
    "kept_entries": "Entries that each KV head keeps of the prompts, on average.",
    "generated_tokens": "Tokens of answers.",
    "decode_steps": "Decoding steps, each for a token of every running answer.",
    "decode_seconds": "Seconds of decoding steps.",
    "prefill_seconds": "Seconds in which prompts were read and evicted from.",
}


class EngineMetrics(Collector):
    """Metrics of an engine; `refused` counts refused requests by HTTP status."""

    def __init__(self, engine: Engine, refused: Mapping[int, int]) -> None:
        self.engine, self.refused = engine, refused

    @override
    def collect(self) -> Iterable[Metric]:
        totals, (running, waiting) = self.engine.totals, self.engine.load
        yield GaugeMetricFamily("keepsight_running", "Answers that are decoded.", running)
        yield GaugeMetricFamily("keepsight_waiting", "Requests that wait for their turn.", waiting)
        yield GaugeMetricFamily("keepsight_kv_bytes", "Bytes of the batch's keys and values.", self.engine.kv_bytes)
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
        texts = {
            "queue_time": "Seconds from a request's arrival to the start of its prefill.",
            "time_to_first_token": "Seconds from a request's arrival to its first token.",
            "time_between_tokens": "Seconds between two tokens of an answer.",
        }
        values = {
            "queue_time": totals.queue,
            "time_to_first_token": totals.first_token,
            "time_between_tokens": totals.between_tokens,
        }
        for name, text in texts.items():
            yield _histogram(f"keepsight_{name}_seconds", text, values[name])


def registry_of(engine: Engine, refused: Mapping[int, int]) -> CollectorRegistry:
    """The metrics of an engine and of this process."""
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine, refused))
    ProcessCollector(registry=registry)
    return registry


def _histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
    counts = [sum(values.counts[: place + 1]) for place in range(len(values.counts))]
    bounds = [*map(str, values.bounds), "+Inf"]
    return HistogramMetricFamily(name, text, buckets=[*zip(bounds, counts, strict=True)], sum_value=values.sum)
