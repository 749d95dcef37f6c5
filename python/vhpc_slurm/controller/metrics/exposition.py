# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP, on a TCP port or a Unix socket, in Prometheus' text format.

There is no authentication: the numbers name no job, node or user. A few connections are
served at once, each for a few seconds at most, so that clients cannot use up vhpcd's threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import BaseServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from vhpc_slurm import __version__
from vhpc_slurm.controller.api.requests import Answering
from vhpc_slurm.controller.metrics.instruments import Instruments, Metered
from vhpc_slurm.controller.metrics.state import StateReader
from vhpc_slurm.controller.sync.isolation import IsolationState
from vhpc_slurm.errors import NodeError

log = logging.getLogger("vhpcd")

AT_ONCE = 8
"""Connections that are served at the same time; others are closed."""
CLIENT_S = 10.0
"""Longest time that a client may take to send its request or to read the answer, in seconds."""


class _StateCollector:
    """Reads vhpcd's state when Prometheus asks."""

    def __init__(self, state: StateReader) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Nothing: the registry must not read the state to learn names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The state as metrics."""
        state = self._state.read()
        version = InfoMetricFamily("vhpc_build", "The version of vhpcd.")
        version.add_metric((), {"version": __version__})
        yield version
        yield _by("vhpc_leases", "Leases by state; released ones are history.", "state", state.leases)
        refusals = CounterMetricFamily(
            "vhpc_lease_refusals", "Jobs refused at their start, by cause.", labels=("cause",)
        )
        for cause, count in sorted(state.refusals.items()):
            refusals.add_metric((cause,), count)
        yield refusals
        yield _by("vhpc_keys", "Partition keys, or VLANs, that are not free, by state.", "state", state.keys)
        yield _by("vhpc_segments", "VNIs of job networks that are not free.", "state", state.segments)
        yield _by("vhpc_queue_length", "What waits for a thread of vhpcd.", "queue", state.waiting)
        yield GaugeMetricFamily(
            "vhpc_devices_in_quarantine",
            "Devices that no job may get, as nodes have reported them since vhpcd began.",
            state.quarantine,
        )
        if state.drained is not None:
            yield GaugeMetricFamily(
                "vhpc_nodes_drained", "Nodes that are drained for a reason of vhpc.", state.drained
            )
        yield from _fabric(state.fabric)


def _fabric(fabric: IsolationState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "vhpc_fabric_safe", "1 while the fabric keeps jobs apart, as far as audits can tell.", fabric.safe
    )
    yield GaugeMetricFamily(
        "vhpc_fabric_lost_keys", "Generations whose port has lost its partition key.", len(fabric.lost)
    )
    for name, text, moment in (
        ("audited", "When an audit last found nothing wrong.", fabric.audited),
        ("open_since", "Since when the fabric is open, or cannot be read.", fabric.open_since),
    ):
        if moment is not None:
            yield GaugeMetricFamily(f"vhpc_fabric_{name}_timestamp_seconds", text, moment)


def _by(name: str, text: str, label: str, counts: Any) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Nothing: Prometheus asks every few seconds."""

    def address_string(self) -> str:
        """Clients of a Unix socket have no address."""
        return str(self.client_address[0]) if self.client_address else "-"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Any, family: socket.AddressFamily) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As HTTPServer does, without looking up this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "vhpcd", 0
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close connections that are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address or ("-", 0))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as in BaseServer
        """Clients that break off are no error of ours."""
        log.debug("a client of the metrics broke off", exc_info=True)


class Exposition:
    """Metrics of one vhpcd, served by a thread until ``close``."""

    def __init__(self, where: str, state: StateReader) -> None:
        """Listen.

        Args:
            where: ``ADDRESS:PORT``, or the absolute path of a Unix socket.
            state: read at each request.

        Raises:
            NodeError: the address cannot be used.
        """
        registry = CollectorRegistry(auto_describe=False)
        self._instruments = Instruments(registry)
        ProcessCollector(registry=registry)
        registry.register(_StateCollector(state))
        self._path = Path(where) if where.startswith("/") else None
        try:
            self._server: BaseServer = self._listen(where, make_wsgi_app(registry))
        except (OSError, ValueError) as err:
            raise NodeError(f"cannot serve metrics at {where}", str(err), "see controller.metrics") from err
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def _listen(self, where: str, app: Any) -> BaseServer:
        if self._path is None:
            host, _, port = where.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = _Server((host, int(port)), family)
        else:
            _remove_stale(self._path)
            server = _Server(where, socket.AF_UNIX)
            self._path.chmod(0o666)  # what may reach it is for its folder to say
        server.set_app(app)
        return server

    def metered(self, requests: Answering) -> Answering:
        """``requests``, with each request counted here."""
        return Metered(requests, self._instruments)

    @property
    def address(self) -> Any:
        """Where it listens."""
        assert isinstance(self._server, _Server)
        return self._server.server_address

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a vhpcd that was killed; OSError if it is something else, or in use."""
    if not path.is_socket():
        if path.is_symlink() or path.exists():
            raise OSError(errno.EEXIST, "there is something else than a socket", str(path))
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another process serves there", str(path))
