# SPDX-License-Identifier: Apache-2.0
"""srun of a step with mpi/pmi2: a task in each guest, and their PMI server.

The server does what src/plugins/mpi/pmi2 of Slurm 24.11 does with these requests: a task begins with "init",
which is read alone; a value that was put is seen after a fence, in which all tasks of the step take part; it
keeps the task's end open.  Run by ``steps_rig`` with the folders of the job and of the programs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Condition, Thread

FOLDER, BIN = Path(sys.argv[1]), Path(sys.argv[2])


class Step:
    """A step and its key-value store."""

    def __init__(self, sockets: list[str]) -> None:
        with (FOLDER / "sruns").open("a") as sruns:
            print(ascii(sys.argv[3:]), file=sruns)
        self.number = len((FOLDER / "sruns").read_text().splitlines())
        self.seen = {"PMI_process_mapping": "(vector,(0,1,2))"}
        self.put: dict[str, str] = {}
        self.fence = Condition()
        self.inside = self.fences = 0
        words = sys.argv[3:]
        while words[0].startswith("-"):
            del words[0]
        self.size = len(sockets)
        self.ends, self.tasks = [], []
        for rank, path in enumerate(sockets):
            own, task = socket.socketpair()
            self.ends.append((own, task))
            Thread(target=self._serve, args=(rank, own), daemon=True).start()
            env = {
                "SLURM_STEP_ID": str(self.number),
                "SLURM_PROCID": str(rank),
                "SLURM_MPI_TYPE": "pmi2",
                "SLURM_STEP_NUM_TASKS": str(self.size),
                "SLURM_STEP_NUM_NODES": "1",
                "PMI_RANK": str(rank),
                "PMI_SIZE": str(self.size),
                "PMI_FD": str(task.fileno()),
                "VHPC_RUN_SOCKET": path,
            }
            self.tasks.append(
                subprocess.Popen(
                    [BIN / "vhpc-run", "--", *words],
                    env=os.environ | env,
                    stdin=subprocess.DEVNULL,
                    stdout=1 if rank == 0 else 2,
                    pass_fds=(task.fileno(),),
                )
            )

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

    def terminate(self) -> None:
        """Signal all tasks."""
        for task in self.tasks:
            task.terminate()

    def wait(self) -> int:
        """The highest code of all tasks."""
        return max(task.wait() for task in self.tasks)


def main() -> None:
    """Run a step."""
    waits = FOLDER / "waits"
    while waits.exists() and not (FOLDER / waits.read_text()).exists():
        time.sleep(0.05)
    step = Step((FOLDER / "sockets").read_text().split())
    signal.signal(signal.SIGTERM, lambda *_: step.terminate())
    sys.exit(step.wait())


if __name__ == "__main__":
    main()
