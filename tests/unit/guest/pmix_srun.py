# SPDX-License-Identifier: Apache-2.0
"""srun of a step with mpi/pmix: a task in each guest, and their PMIx server.

The server does what libpmix 5.0.7 does for slurmstepd with these requests of its wire format: it knows only
tasks of its own namespace, waits for a value that another task has not committed, and takes a connection that
ends before FINALIZE for a task that has died.  Run by ``steps_rig`` with the folders of job and programs.
"""

from __future__ import annotations

import socket
import struct
from threading import Condition, Thread

from srun_step import FOLDER, SrunStep, sockets

COMMIT, FENCE, GET, FINALIZE, REGISTER, DEREGISTER = 2, 3, 4, 5, 13, 14
GOOD, NOT_FOUND = b"\2\0", b"\2\x5b"


class Step(SrunStep):
    """A step, what its tasks have committed, and how many wait in a fence."""

    def __init__(self) -> None:
        super().__init__(sockets())
        self.namespace = f"slurm.pmix.42.{self.number * 7}"  # of one digit, then of two
        self.values: dict[int, bytes] = {}
        self.changed = Condition()
        self.inside = self.fences = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        uri = f"pmix-server.7;tcp4://127.0.0.1:{self.listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()
        for rank in range(self.size):
            variables = {"PMIX_NAMESPACE": self.namespace, "PMIX_RANK": str(rank), "PMIX_SERVER_URI41": uri}
            self.start(rank, "pmix", variables)

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


if __name__ == "__main__":
    Step().run()
