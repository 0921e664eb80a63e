"""OpenTelemetry traces: one span per captured call, below the agent's own span if it sent one.

The agent's ``traceparent`` header is read and passed on to the engine untouched. Attributes name
the call and what became of it, never texts or tokens. Where spans go is OpenTelemetry's own
configuration (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, ...). Needs the extra
``otel``. Source: spec 08, "Metrics".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from middleware._version import __version__
from middleware.errors import ConfigurationError
from middleware.observer import CallReport, CaptureObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_PREFIX: Final = "token_capture."
_NS: Final = 1_000_000_000


class CallTracer(CaptureObserver):
    """Makes a span of every captured call that was dispatched.

    Args:
        exporter: where spans go; default OTLP over HTTP as the environment says.

    Raises:
        ConfigurationError: the extra is not installed.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        self._provider = _provider(exporter)
        self._tracer = self._provider.get_tracer("token_capture", __version__)

    def ended(self, report: CallReport) -> None:
        """See ``CaptureObserver``."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = report.context
        carrier = {"traceparent": context.trace_parent} if context.trace_parent else {}
        start = report.started_at
        span = self._tracer.start_span(
            f"capture {context.dialect}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                f"{_PREFIX}rollout_id": context.rollout_id,
                f"{_PREFIX}model_call_id": context.model_call_id,
                f"{_PREFIX}engine": context.engine,
                f"{_PREFIX}outcome": report.outcome,
                f"{_PREFIX}reason": report.reason,
                "gen_ai.request.model": context.model,
            },
            start_time=_ns(start),
        )
        if context.parent_call_id is not None:
            span.set_attribute(f"{_PREFIX}parent_call_id", context.parent_call_id)
        dispatched = start + report.before_dispatch_s
        span.add_event("dispatched", timestamp=_ns(dispatched))
        if report.first_token_s is not None:
            span.add_event("first token", timestamp=_ns(dispatched + report.first_token_s))
        if report.put_s is not None:
            span.set_attribute(f"{_PREFIX}put_s", report.put_s)
        if report.outcome == "incomplete":
            span.set_status(Status(StatusCode.ERROR, report.reason))
        span.end(_ns(start + report.total_s))

    def close(self) -> None:
        """Send what is left; blocks for the exporter's own time limit at most."""
        self._provider.shutdown()


def _provider(exporter: SpanExporter | None) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigurationError(
            "traces need the extra: pip install 'token-capture[otel]', or set traces to off"
        ) from exc
    resource = Resource.create({"service.name": "token-capture", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    return provider


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
