# SPDX-License-Identifier: Apache-2.0
"""`vlab status`: running hosts and units, for people and programs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from vlablib import services
from vlablib.running import find
from vlablib.services import units_of
from vlablib.settings import Lab, Record, address

_ALL_RUN, _NOT_ALL, _DOWN = 0, 1, 3
_WIDTH = 12


def show(lab: Lab, arguments: argparse.Namespace) -> int:
    """Print the state of the lab; return 0 if all units run, 1 if not all, 3 if the lab is down."""
    state = collect(lab)
    if arguments.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        _print(state)
    if not state["up"]:
        return _DOWN
    units = [unit["state"] for host in state["hosts"].values() for unit in host["units"].values()]
    pids = [host["pid"] for host in state["hosts"].values()]
    return _ALL_RUN if all(pids) and set(units) <= {"ready", "not installed"} else _NOT_ALL


def collect(lab: Lab) -> dict[str, Any]:
    """Return the state of the lab as JSON values."""
    pids = find(lab)
    record = Record.read(lab)
    state: dict[str, Any] = {
        "up": "lab" in pids and record is not None,
        "suite": record.suite if record else None,
        "rootfs": record.rootfs if record else None,
        "paths": {
            "state": str(lab.state),
            "home": str(lab.home),
            "scratch": str(lab.scratch),
            "shared": str(lab.shared),
        },
        "hosts": {},
    }
    for host in record.hosts if record else ():
        pid = pids.get(host)
        units = {}
        assert record is not None
        for unit in units_of(host, fabric=record.fabric, controllers=record.controllers, light=record.light):
            what = "not installed"
            if services.installed(unit, lab, pid):
                what = services.state(pid, unit) if pid else "dead"
            units[unit.name] = {"state": what, "pid": services.pid_of(pid, unit) if pid else None}
        state["hosts"][host] = {"pid": pid, "address": address(host), "units": units}
    return state


def _print(state: dict[str, Any]) -> None:
    if not state["up"]:
        sys.stdout.write("the lab is down\n")
        return
    sys.stdout.write(f"suite {state['suite']}, hosts:\n")
    for name, host in state["hosts"].items():
        units = "  ".join(f"{unit} {what['state']}" for unit, what in host["units"].items())
        place = host["address"] if host["pid"] else "DEAD"
        sys.stdout.write(f"  {name:6} {place:{_WIDTH}} {units}\n")
