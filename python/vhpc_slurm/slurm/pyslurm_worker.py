# SPDX-License-Identifier: Apache-2.0
"""The child process that imports pyslurm and answers questions; ``pyslurm_client`` starts it.

A process of its own, because libslurm ends its process on errors of
configuration, and because pyslurm holds the interpreter's lock while it waits
for slurmctld.  Runs as a script and imports nothing of vhpc, so that it starts
quickly.  It reads questions from standard input and writes answers to what was
standard output, as frames: four bytes of length, most significant first, then
JSON.  The first frame is the versions.  It ends with its parent (end of file),
and by SIGALRM when a question takes longer than the parent waits.

Properties of pyslurm 25.11.2, from its source: ``Job.load`` is two requests; text that is not
UTF-8 raises UnicodeDecodeError, which has the bytes; "None" becomes None; CPU
ids are core ids; the records of an array after the first one are never freed,
so the client replaces this process now and then.
"""
# Decision: pyslurm runs in a process of its own

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_QUESTION = 4096
MAX_ANSWER = 64 << 20
"""Bytes of a frame; a listing has about 100 for each job."""
MAX_MEMORY = 8 << 30
"""Address space of this process in bytes: a struct that pyslurm misreads must not fill the host's memory."""
NODES_AGE_S = 60.0
"""How long the cores and threads of nodes are kept: they change with slurm.conf only."""
ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED"),
)
"""States of jobs that squeue does not list."""

Answer = dict[str, Any]


class Questions:
    """Answers to questions, by pyslurm."""

    def __init__(self, api: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """``api`` is the module pyslurm."""
        self._api = api
        self._clock = clock
        self._nodes: dict[str, list[int]] = {}
        self._nodes_at: float | None = None

    def versions(self) -> Answer:
        """pyslurm's version, and that of the Slurm whose headers it was built with."""
        built = getattr(self._api, "slurm_api_version", None)
        return {
            "pyslurm": str(getattr(self._api, "__version__", "")),
            "built": ".".join(
                f"{part:02d}" if place == 1 else str(part) for place, part in enumerate(built())
            )
            if built
            else "",
        }

    def answer(self, question: Answer) -> Answer:
        """Answer one question; what pyslurm raises becomes an answer too."""
        try:
            if question.get("ask") == "job":
                return self._job(int(question["id"]))
            return {"jobs": self._jobs()}
        except self._api.RPCError as err:
            return {"refused": str(err), "errno": getattr(err, "errno", 0)}
        except Exception as err:  # whatever it is, the parent decides
            return {"failed": f"{type(err).__name__}: {err}"}

    def _job(self, job_id: int) -> Answer:
        job = self._api.Job.load(job_id)
        layout = job.get_resource_layout_per_node()
        return {
            "id": job.id,
            "restarts": job.requeue_count or 0,
            "state": _text(job, "state"),
            "reason": _text(job, "state_reason"),
            "uid": job.user_id,
            "gid": job.group_id,
            "user": _text(job, "user_name"),
            "partition": _text(job, "partition"),
            "name": _text(job, "name", "None"),
            "work_dir": _text(job, "working_directory"),
            "features": _words(job, "constraints"),
            "account": _text(job, "account"),
            "qos": _text(job, "qos"),
            "batch_host": _text(job, "batch_host") if job.is_batch_job else "",
            "het": job.heterogeneous_id or 0,
            "waiting": _text(job, "array_tasks_waiting"),
            "cpus": job.cpus or 0,
            "nodes": _text(job, "allocated_nodes"),
            "layout": [
                [name, part["cpu_ids"] or "", part["memory"] or 0, part["gres"], self._node(name)]
                for name, part in layout.items()
            ],
        }

    def _jobs(self) -> list[list[Any]]:
        found = []
        for job in self._api.Jobs.load().values():
            state = _text(job, "state")
            if state not in ENDED:
                reason = _text(job, "state_reason", "None")
                found.append([job.id, job.requeue_count or 0, state, reason, job.start_time or 0])
        return found

    def _node(self, name: str) -> list[int] | None:
        """Cores and threads per core of a node; None when Slurm does not show it."""
        now = self._clock()
        if self._nodes_at is None or now - self._nodes_at > NODES_AGE_S or name not in self._nodes:
            self._nodes = {
                _text(node, "name"): [
                    (node.sockets or 0) * (node.cores_per_socket or 0),
                    node.threads_per_core or 1,
                ]
                for node in self._api.Nodes.load().values()
            }
            self._nodes_at = now
        return self._nodes.get(name)


def _text(record: Any, field: str, instead: str = "") -> str:
    """A text as Slurm's commands give it: what is not UTF-8 becomes U+FFFD."""
    try:
        return str(getattr(record, field) or instead)
    except UnicodeDecodeError as err:
        return err.object.decode(errors="replace")


def _words(record: Any, field: str) -> str:
    try:
        return ",".join(getattr(record, field) or ())
    except UnicodeDecodeError as err:
        return err.object.decode(errors="replace")


def read_frame(stream: BinaryIO) -> Answer | None:
    """The next question; None at the end of the stream, or when it is none of the client's."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack(">I", head)[0]
    if size > MAX_QUESTION:
        return None
    body = stream.read(size)
    return dict(json.loads(body)) if len(body) == size else None


def frame(answer: Answer) -> bytes:
    """An answer as a frame; a longer one becomes a failure."""
    body = json.dumps(answer).encode()
    if len(body) > MAX_ANSWER:
        body = json.dumps({"failed": f"the answer is longer than {MAX_ANSWER} bytes"}).encode()
    return struct.pack(">I", len(body)) + body


def main(path: str, limit_s: float) -> int:
    """Answer questions until the parent closes the pipe.

    Args:
        path: the parent's ``sys.path`` as JSON: modules are found where the parent finds them.
        limit_s: seconds after which a question ends this process.
    """
    sys.path[:] = json.loads(path)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # what libslurm or a module prints is no answer
        import pyslurm

        questions = Questions(pyslurm)
        answer: Answer = questions.versions()
        while True:
            data = memoryview(frame(answer))
            while data:
                data = data[out.write(data) or 0 :]
            signal.setitimer(signal.ITIMER_REAL, 0)
            question = read_frame(sys.stdin.buffer)
            if question is None:
                return 0
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            answer = questions.answer(question)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
