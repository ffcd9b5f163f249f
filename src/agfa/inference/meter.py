"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

PATHS = frozenset({"/", "/predict", "/imagine", "/model", "/healthz", "/metrics"})


class Meter:
    """One server's counts; no other's are mixed in."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        powers = [2**i for i in range(11)]
        self.requests = Counter("agfa_requests", "Requests answered", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "agfa_request_seconds", "From a request's head to its answer", ["path"], registry=own
        )
        self.images = Counter("agfa_images", "Images that came to be predicted", registry=own)
        self.batches = Histogram(
            "agfa_batch_images", "Images given to the model at a time", buckets=powers, registry=own
        )
        self.waiting = Gauge("agfa_waiting_images", "Images taken in and not yet answered", registry=own)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request; what is asked for of paths that are not there is not kept."""
        path = path if path in PATHS else "other"
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def page(self) -> tuple[bytes, int, None, str]:
        """What /metrics answers: body, status, headers, media type."""
        return generate_latest(self.registry), 200, None, CONTENT_TYPE_LATEST
