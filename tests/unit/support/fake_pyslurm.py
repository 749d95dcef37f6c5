# SPDX-License-Identifier: Apache-2.0
"""A module pyslurm for tests: answers from scenario.json in its folder, with the real one's behaviour.

Modelled on pyslurm 25.11.2 (core/job/job.pyx, core/node.pyx, utils/cstr.pyx,
core/error.pyx), as read in its source and seen with a real slurmctld:
properties that decode text raise UnicodeDecodeError for other encodings, the
text "None" and empty text become None, zero becomes None, layouts have ids of
cores whatever the threads, the import ends the process without a slurm.conf,
and a slurmctld that hangs holds the interpreter's lock.

``install`` copies this file as package ``pyslurm`` into a folder.  The scenario::

    version, built            of pyslurm and of its Slurm
    import                    "", "exit", "hang", "noise", "no module"
    behaviour                 "", "hang", "exit", "slow", "refused", "raise"
    jobs                      ptr fields of each job; text as bytes in latin-1
    layouts                   of each job: node → [core ids, memory, GRES]
    nodes                     name → [sockets, cores, threads]
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INVALID_JOB_ID = 2017


def install(folder: Path, **scenario: Any) -> Path:
    """Make the package in ``folder``, which must be in sys.path; returns its folder."""
    package = folder / "pyslurm"
    package.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, package / "__init__.py")
    change(package, **scenario)
    return package


def change(package: Path, **scenario: Any) -> None:
    """Replace parts of the scenario, also of one that runs."""
    path = package / "scenario.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(known | scenario))
    temporary.replace(path)


def requests(package: Path) -> list[str]:
    """The requests to slurmctld."""
    path = package / "requests"
    return path.read_text().split() if path.exists() else []


def _scenario() -> dict[str, Any]:
    return dict(json.loads((HERE / "scenario.json").read_text()))


def _request(name: str) -> dict[str, Any]:
    with (HERE / "requests").open("a") as file:
        file.write(f"{name}\n")
    scenario = _scenario()
    match scenario.get("behaviour"):
        case "hang":
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, as libslurm's calls do
        case "slow":
            ctypes.PyDLL(None).usleep(500_000)
        case "exit":
            os.write(2, b"error: something\nfatal: libslurm says goodbye\n")
            os._exit(1)
        case "refused":
            raise RPCError(1800, "Unable to contact slurm controller (connect failure)")
        case "raise":
            raise ValueError("Unable to create hostlist.")
    return scenario


class RPCError(Exception):
    def __init__(self, errno: int = -1, msg: str = "") -> None:
        self.errno, self.msg = errno, msg
        super().__init__(msg)


def _decoded(text: str | None) -> str | None:
    """As utils/cstr.pyx: empty and None are None; the scenario has bytes as latin-1."""
    value = (text or "").encode("latin-1").decode()
    return None if value in ("", "None") else value


class Job:
    TEXTS = (
        *("state", "state_reason", "user_name", "partition", "name", "working_directory", "account", "qos"),
        *("batch_host", "array_tasks_waiting", "allocated_nodes"),
    )
    LISTS = ("constraints",)

    def __init__(self, fields: dict[str, Any], layout: dict[str, Any]) -> None:
        self._fields, self._layout = fields, layout

    def __getattr__(self, name: str) -> Any:
        if name in self.TEXTS:
            return _decoded(self._fields.get(name))
        if name in self.LISTS:
            text = _decoded(self._fields.get(name))
            return text.split(",") if text else []
        if name in ("user_id", "group_id", "id", "is_batch_job"):
            return self._fields[name]
        return self._fields[name] or None

    def get_resource_layout_per_node(self) -> dict[str, Any]:
        return {
            name: {"cpu_ids": part[0], "memory": part[1] or None, "gres": part[2]}
            for name, part in self._layout.items()
        }

    @staticmethod
    def load(job_id: int) -> Job:
        scenario = _request("job")
        _request("steps")
        found = scenario["jobs"].get(str(job_id))
        if found is None:
            raise RPCError(INVALID_JOB_ID, "Invalid job id specified")
        return Job(found, scenario["layouts"].get(str(job_id), {}))


class Jobs(dict[int, Job]):
    @staticmethod
    def load() -> Jobs:
        return Jobs({int(key): Job(fields, {}) for key, fields in _request("jobs")["jobs"].items()})


class Node:
    def __init__(self, name: str, size: list[int]) -> None:
        self.name = name
        self.sockets, self.cores_per_socket, self.threads_per_core = size


class Nodes(dict[str, Node]):
    @staticmethod
    def load() -> Nodes:
        _request("partitions")
        return Nodes({name: Node(name, size) for name, size in _request("nodes")["nodes"].items()})


def slurm_api_version() -> tuple[int, ...]:
    return tuple(int(part) for part in _scenario()["built"].split("."))


if __name__ == "pyslurm":
    __version__ = _scenario()["version"]
    (HERE / "slurm.conf").write_text(os.environ.get("SLURM_CONF", ""))
    (HERE / "pid").write_text(str(os.getpid()))
    match _scenario().get("import"):
        case "exit":
            os.write(2, b"error: s_p_parse_file: unable to status file /etc/slurm/slurm.conf\n")
            os.write(2, b"fatal: Unable to process configuration file\n")
            os._exit(1)
        case "hang":
            ctypes.PyDLL(None).sleep(60)
        case "noise":
            print("pyslurm says hello", flush=True)
            sys.stderr.write("x" * 200_000)
        case "no module":
            raise ImportError("libslurmfull.so: cannot open shared object file: No such file or directory")
