"""Metrics: what Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL = ("model", "version")


class _DeviceMemory(Collector):
    """Asks for the memory of the devices whenever metrics are read."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "graphwright_device_memory_bytes", "Memory that PyTorch holds.", labels=["device"]
        )
        for device, count in self._read().items():
            family.add_metric([device], count)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield from ()


class Metrics:
    """The metrics of one server.

    Args:
        device_memory: gives the bytes held on each device.
    """

    def __init__(self, device_memory: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_DeviceMemory(device_memory))
        registry = self.registry
        self.requests = Counter(
            "graphwright_requests",
            "Requests by outcome: answered, or what was wrong.",
            (*_MODEL, "outcome"),
            registry=registry,
        )
        self.latency = Histogram(
            "graphwright_request_seconds",
            "From the receipt of a request to its answer.",
            (*_MODEL, "outcome"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.stages = Histogram(
            "graphwright_stage_seconds",
            "What a request waits for: queue, compute_input, compute_infer, compute_output, "
            "preprocess, postprocess.",
            (*_MODEL, "stage"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue = Gauge(
            "graphwright_queue_requests", "Requests that wait.", _MODEL, registry=registry
        )
        self.batch_rows = Histogram(
            "graphwright_batch_rows",
            "Rows of requests in a batch.",
            _MODEL,
            buckets=_ROWS,
            registry=registry,
        )
        self.buckets = Counter(
            "graphwright_bucket_batches",
            "Batches by the smallest of the measured sizes that holds them.",
            (*_MODEL, "bucket"),
            registry=registry,
        )
        self.elements = Counter(
            "graphwright_elements",
            "Elements computed: of requests, and padding.",
            (*_MODEL, "kind"),
            registry=registry,
        )
        self.calls = Counter(
            "graphwright_calls",
            "Calls of the model for requests: by graph, tuned, or eager with the reason.",
            (*_MODEL, "how"),
            registry=registry,
        )

    def of_model(self, name: str, version: str) -> ModelMetrics:
        """The metrics of one model."""
        return ModelMetrics(self, name, version)

    def text(self) -> tuple[bytes, str]:
        """Prometheus' text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class ModelMetrics:
    """Counts for one model."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (name, version)
        self._ok = metrics.requests.labels(name, version, "answered")
        self._ok_seconds = metrics.latency.labels(name, version, "answered")
        self._stages: dict[str, Histogram] = {}
        self._queue = metrics.queue.labels(name, version)
        self._rows = metrics.batch_rows.labels(name, version)
        self._buckets: dict[tuple[int, ...] | None, Counter] = {}
        self._requested = metrics.elements.labels(name, version, "requested")
        self._padding = metrics.elements.labels(name, version, "padding")

    def answered(self, seconds: float) -> None:
        """Count a request that was answered."""
        self._ok.inc()
        self._ok_seconds.observe(seconds)

    def failed(self, why: str, seconds: float) -> None:
        """Count a request that was not."""
        self._metrics.requests.labels(*self._labels, why).inc()
        self._metrics.latency.labels(*self._labels, why).observe(seconds)

    def stage(self, name: str, seconds: float) -> None:
        """Note how long a stage took."""
        known = self._stages.get(name)
        if known is None:
            known = self._stages[name] = self._metrics.stages.labels(*self._labels, name)
        known.observe(seconds)

    def waiting(self, count: int) -> None:
        """Note how many requests wait."""
        self._queue.set(count)

    def batch(self, rows: int, bucket: tuple[int, ...] | None, computed: int, true: int) -> None:
        """Count a batch: its rows, the measured sizes that hold it (if any do), its elements."""
        self._rows.observe(rows)
        known = self._buckets.get(bucket)
        if known is None:
            label = "larger" if bucket is None else "x".join(map(str, bucket))
            known = self._buckets[bucket] = self._metrics.buckets.labels(*self._labels, label)
        known.inc()
        self._requested.inc(true)
        self._padding.inc(max(0, computed - true))

    def calls(self, new: Mapping[str, int]) -> None:
        """Count calls of the model by how they were answered."""
        for how, count in new.items():
            self._metrics.calls.labels(*self._labels, how).inc(count)
