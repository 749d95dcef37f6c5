# SPDX-License-Identifier: Apache-2.0
"""srun of a step with mpi/pmix: a task in each guest, and their PMIx server.

The server does what libpmix 5.0.7 does for slurmstepd with these requests of its wire format: it knows only
tasks of its own namespace, waits for a value that another task has not committed, and takes a connection that
ends before FINALIZE for a task that has died.  Run by ``steps_rig`` with the folders of job and programs.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from threading import Condition, Thread

FOLDER, BIN = Path(sys.argv[1]), Path(sys.argv[2])
COMMIT, FENCE, GET, FINALIZE, REGISTER, DEREGISTER = 2, 3, 4, 5, 13, 14
GOOD, NOT_FOUND = b"\2\0", b"\2\x5b"


class Step:
    """A step, what its tasks have committed, and how many wait in a fence."""

    def __init__(self, sockets: list[str]) -> None:
        with (FOLDER / "sruns").open("a") as sruns:
            print(ascii(sys.argv[3:]), file=sruns)
        number = len((FOLDER / "sruns").read_text().splitlines())
        self.namespace = f"slurm.pmix.42.{number * 7}"  # of one digit, then of two
        self.number, self.size = number, len(sockets)
        self.values: dict[int, bytes] = {}
        self.changed = Condition()
        self.inside = self.fences = 0
        words = sys.argv[3:]
        while words[0].startswith("-"):
            del words[0]
        self.listener = socket.create_server(("127.0.0.1", 0))
        uri = f"pmix-server.7;tcp4://127.0.0.1:{self.listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()
        self.tasks = []
        for rank, path in enumerate(sockets):
            env = {
                "SLURM_STEP_ID": str(number),
                "SLURM_PROCID": str(rank),
                "SLURM_MPI_TYPE": "pmix",
                "SLURM_STEP_NUM_TASKS": str(self.size),
                "SLURM_STEP_NUM_NODES": "1",
                "PMIX_NAMESPACE": self.namespace,
                "PMIX_RANK": str(rank),
                "PMIX_SERVER_URI41": uri,
                "VHPC_RUN_SOCKET": path,
            }
            self.tasks.append(
                subprocess.Popen(
                    [BIN / "vhpc-run", "--", *words],
                    env=os.environ | env,
                    stdin=subprocess.DEVNULL,
                    stdout=1 if rank == 0 else 2,
                )
            )

    def _accept(self) -> None:
        while True:
            link = self.listener.accept()[0]
            Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            self._talk(link)
        except (OSError, AssertionError) as err:
            with (FOLDER / "pmix-errors").open("a") as errors:
                print(f"step {self.number}: {type(err).__name__} {err}", file=errors)
        link.close()

    def _talk(self, link: socket.socket) -> None:
        nobody, length, _ = struct.unpack("=8sII", link.recv(16, socket.MSG_WAITALL))
        assert nobody == b"\xff" * 8, nobody
        fields = link.recv(length, socket.MSG_WAITALL).removeprefix(b"native\0\0\0\0\0\0").split(b"\0")
        rank = fields[1][0] if fields[1] else 0
        if (FOLDER / "refuses").exists():
            link.sendall(struct.pack(">i", -46))
            return
        assert fields[0].decode() == self.namespace, fields
        link.sendall(struct.pack(">iI", 0, rank))
        finalized = False
        while head := link.recv(16, socket.MSG_WAITALL):
            _, tag, length, _ = struct.unpack(">IIII", head)
            content = link.recv(length, socket.MSG_WAITALL)
            with (FOLDER / "asked").open("a") as log:
                print(self.number, rank, content[1], file=log)
            finalized = finalized or content[1] == FINALIZE
            thread = Thread(target=self._answer, args=(link, rank, tag, content), daemon=True)
            thread.start()
        assert finalized, f"task {rank} has died"

    def _answer(self, link: socket.socket, rank: int, tag: int, content: bytes) -> None:
        name = self.namespace.encode() + b"\0"
        text = b"\2" + bytes([2 * len(name)]) + name
        command, said = content[1], GOOD
        with self.changed:
            if command == COMMIT:
                self.values[rank] = content[2:]
            elif command == FENCE:
                mine = self.fences
                self.inside += 1
                if self.inside == self.size:
                    self.inside, self.fences = 0, mine + 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.fences > mine)
                said = GOOD if text in content else NOT_FOUND
            elif command == GET:
                other = content[2 + len(text)]
                self.changed.wait_for(lambda: other in self.values)
                found = text + bytes([other]) + self.values[other]
                said = (
                    GOOD + b"\2" + bytes([len(found)]) + found if content[2:].startswith(text) else NOT_FOUND
                )
            self.changed.notify_all()
        if command != DEREGISTER:
            link.sendall(struct.pack(">IIII", 0, tag, len(said), 0) + said)

    def terminate(self) -> None:
        """Signal all tasks."""
        for task in self.tasks:
            task.terminate()

    def wait(self) -> int:
        """The highest code of all tasks."""
        return max(task.wait() for task in self.tasks)


def main() -> None:
    """Run a step."""
    step = Step((FOLDER / "sockets").read_text().split())
    signal.signal(signal.SIGTERM, lambda *_: step.terminate())
    sys.exit(step.wait())


if __name__ == "__main__":
    main()
