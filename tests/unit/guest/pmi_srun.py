# SPDX-License-Identifier: Apache-2.0
"""srun of a step with mpi/pmi2: a task in each guest, and their PMI server.

The server does what src/plugins/mpi/pmi2 of Slurm 24.11 does with these requests: a task begins with "init",
which is read alone; a value that was put is seen after a fence, in which all tasks of the step take part; it
keeps the task's end open.  Run by ``steps_rig`` with the folders of the job and of the programs.
"""

from __future__ import annotations

import re
import socket
import time
from threading import Condition, Thread

from srun_step import FOLDER, SrunStep, sockets


class Step(SrunStep):
    """A step and its key-value store."""

    def __init__(self) -> None:
        super().__init__(sockets())
        self.seen = {"PMI_process_mapping": "(vector,(0,1,2))"}
        self.put: dict[str, str] = {}
        self.fence = Condition()
        self.inside = self.fences = 0
        self.ends = []
        for rank in range(self.size):
            own, task = socket.socketpair()
            self.ends.append((own, task))
            Thread(target=self._serve, args=(rank, own), daemon=True).start()
            end = task.fileno()
            variables = {"PMI_RANK": str(rank), "PMI_SIZE": str(self.size), "PMI_FD": str(end)}
            self.start(rank, "pmi2", variables, end)

    def _serve(self, rank: int, own: socket.socket) -> None:
        try:
            self._talk(rank, own)
        except (OSError, ValueError, AssertionError) as err:
            with (FOLDER / "pmi-errors").open("a") as errors:
                print(f"step {self.number}, task {rank}: {type(err).__name__} {err}", file=errors)

    def _talk(self, rank: int, own: socket.socket) -> None:
        init = own.recv(64).decode()
        found = re.fullmatch(r"cmd=init pmi_version=(\d) pmi_subversion=\d\n", init)
        assert found is not None, repr(init)
        version = int(found[1])
        subversion = 1 if version == 1 else 0
        own.sendall(f"cmd=response_to_init rc=0 pmi_version={version} pmi_subversion={subversion}\n".encode())
        stream = own.makefile("rb")
        while True:
            asked = stream.readline() if version == 1 else stream.read(6)
            if version == 2:
                assert len(asked) == 6, asked
                asked = stream.read(int(asked))
            text = asked.decode().rstrip("\n")
            with (FOLDER / "asked").open("a") as log:
                print(self.number, rank, text, file=log)
            fields = dict(re.findall(r"(\w+)=([^ ;]*)", text))
            answer = self._answer(fields["cmd"] if version == 1 else text[4:].split(";")[0], fields)
            if version == 2:
                answer = answer.replace(" ", ";") + ";"
                answer = f"{len(answer):6}{answer}"
            own.sendall((answer + ("\n" if version == 1 else "")).encode())
            if "finalize" in text.split("=")[1]:
                own.shutdown(socket.SHUT_RDWR)
                return

    def _answer(self, command: str, fields: dict[str, str]) -> str:
        if command in ("put", "kvs-put"):
            self.put[fields["key"]] = fields["value"]
            if (FOLDER / "refuses").exists():
                return "cmd=put_result rc=1"
            return {"put": "cmd=put_result rc=0", "kvs-put": "cmd=kvs-put-response rc=0"}[command]
        if command in ("barrier_in", "kvs-fence"):
            self._fence()
            return "cmd=barrier_out" if command == "barrier_in" else "cmd=kvs-fence-response rc=0"
        if command in ("get", "kvs-get"):
            name = {"get": "get_result", "kvs-get": "kvs-get-response"}[command]
            value = self.seen.get(fields["key"])
            if command == "kvs-get":
                return f"cmd={name} rc=0 " + (f"found=TRUE value={value}" if value else "found=FALSE")
            return f"cmd={name} rc=0 value={value}" if value else f"cmd={name} rc=1"
        known = {
            "fullinit": "cmd=fullinit-response rc=0 pmi-version=2 pmi-subversion=0",
            "get_maxes": "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=512",
            "publish_name": "cmd=publish_result info=ok",
            "finalize": "cmd=finalize_ack rc=0" if "thrid" not in fields else "cmd=finalize-response rc=0",
        }
        assert command in known, command
        return known[command]

    def _fence(self) -> None:
        with self.fence:
            self.inside += 1
            mine = self.fences
            if self.inside == self.size:
                self.seen |= self.put
                self.put.clear()
                self.inside, self.fences = 0, mine + 1
                self.fence.notify_all()
            self.fence.wait_for(lambda: self.fences > mine)


def main() -> None:
    """Run a step."""
    waits = FOLDER / "waits"
    while waits.exists() and not (FOLDER / waits.read_text()).exists():
        time.sleep(0.05)
    Step().run()


if __name__ == "__main__":
    main()
