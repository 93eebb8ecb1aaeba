"""Serves `/metrics` for Prometheus: the newest record as gauges such as `lockstep_loss`."""

import re
from typing import Any

from lockstep.config import PrometheusConfig
from lockstep.errors import UsageError
from lockstep.monitor.sinks import Row, scalars, warn_left_out


def open_prometheus(config: PrometheusConfig, run_name: str) -> "Prometheus | None":
    """Return the sink, which is also a server; warn and return None if the library is missing.

    Raises:
        UsageError: the port is in use.
    """
    try:
        import prometheus_client
    except ImportError:
        warn_left_out("prometheus", "prometheus")
        return None
    return Prometheus(prometheus_client, config, run_name)


class Prometheus:
    """Serves the newest record until it is closed."""

    def __init__(self, library: Any, config: PrometheusConfig, run_name: str) -> None:
        self._library, self._run_name = library, run_name
        self._registry = library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = library.start_http_server(config.port, config.host, self._registry)
        except OSError as error:
            raise UsageError(
                f"Prometheus can't be served at {config.host}:{config.port}: {error.strerror}",
                where="monitor.prometheus",
                fix="choose another port; 0 takes any free one",
            ) from None
        self.address = f"http://{config.host}:{self._server.server_address[1]}/metrics"

    def on_step(self, row: Row) -> None:
        """Set the gauges to a row's numbers."""
        self._set("step", float(row["step"]), {})
        for name, value in scalars(row).items():
            first, _, rest = name.partition("/")
            labelled = {"phases": ("phase_seconds", "phase"), "memory": ("memory_held_bytes", "kind"),
                        "gradient_norms": ("gradient_norm", "layer")}.get(first)  # fmt: skip
            if labelled is None:
                self._set(name, value, {})
            elif rest.endswith(".most"):
                self._set(f"{labelled[0]}_most", value, {labelled[1]: rest.removesuffix(".most")})
            else:
                self._set(labelled[0], value, {labelled[1]: rest})

    on_eval = on_step

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _set(self, name: str, value: float, labels: dict[str, str]) -> None:
        full = "lockstep_" + re.sub(r"\W", "_", name)
        gauge = self._gauges.get(full)
        if gauge is None:
            about = f"{name} of the newest record"
            gauge = self._library.Gauge(full, about, ["run", *labels], registry=self._registry)
            self._gauges[full] = gauge
        gauge.labels(run=self._run_name, **labels).set(value)
