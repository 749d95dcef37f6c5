# SPDX-License-Identifier: Apache-2.0
"""Attendants: processes of vhpc that live as long as a job on a node, such as the keeper and the follower.

They need root's rights, so vhpc-confine does not start them. They are not in the control group of
the generation, whose memory belongs to the guests' daemons; like all helpers they have their own session,
and slurmd's unit has ``KillMode=process``, so slurmd and systemd do not end them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import vhpc_slurm
from vhpc_slurm import files
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

START = ("-P", "-s", "-m", "vhpc_slurm.hooks.start")


class NotStartedError(NodeError):
    """The program cannot be started here."""


class Attendant:
    """One kind of attendant; a job has at most one of it on a node.

    Its program gets the words generation, node, and one that says whether it is the first of the job.

    Attributes:
        role: its name in the journal, and of its files in the job's run folder.
        program: arguments of Python.
        first: the last word for the first one of a job.
        again: the last word for one that takes the place of another.
    """

    def __init__(self, role: str, *, first: str, again: str) -> None:
        self.role, self.first, self.again = role, first, again
        self.program: Sequence[str] = (*START, f"vhpc_slurm.hooks.{role}")

    def start(self, layout: Layout, journal: Journal, node: str) -> None:
        """Start the first one of a job.

        Raises:
            NotStartedError: it cannot be started.
            NodeError, FabricError: the journal cannot be written.
            Stopped: the job has ended meanwhile.
        """
        key = Process().announce(journal, self.role, self.role)
        try:
            ref = self._spawn(layout, journal.generation, node, self.first)
        except NodeError as err:
            journal.released(key)
            raise NotStartedError(err.what, err.why, err.hint) from err
        Process().note(journal, key, ref)

    def start_again(self, layout: Layout, journal: Journal, entry: Entry, node: str) -> ProcessRef:
        """Start one in the place of another one that has ended.

        Raises:
            NodeError: it cannot be started, or the journal cannot be written.
            FabricError: the file system of the journal is full.
        """
        ref = self._spawn(layout, journal.generation, node, self.again)
        Process().note(journal, entry.key, ref)
        return ref

    def entry_of(self, held: Sequence[Entry]) -> Entry | None:
        """Its entry in a journal; None if the job has none."""
        mine = (entry for entry in held if entry.kind == Process.kind)
        return next((entry for entry in mine if entry.read(ProcessData).role == self.role), None)

    def lives(self, layout: Layout, generation: Generation, entry: Entry) -> bool:
        """Whether it runs, or has nothing more to do; also one that the journal does not know yet."""
        if layout.attendant_over(generation.job_id, self.role).exists():
            return True
        ref = entry.read(ProcessData).ref
        return (ref is not None and process.alive(ref)) or self.works(layout, generation)

    def works(self, layout: Layout, generation: Generation) -> bool:
        """Whether one of the job has begun its work."""
        return files.is_locked(layout.attendant_lock(generation.job_id, self.role))

    def said(self, layout: Layout, generation: Generation) -> str:
        """The last lines of one that did not start."""
        try:
            return process.last_lines(self._output(layout, generation).read_bytes()[-4096:])
        except OSError:
            return ""

    def _output(self, layout: Layout, generation: Generation) -> Path:
        """The file for what Python writes if the program fails."""
        return layout.job(generation.job_id) / f"{self.role}.log"

    def _spawn(self, layout: Layout, generation: Generation, node: str, begin: str) -> ProcessRef:
        """Start it; its messages are in hooks.log."""
        variables = {
            "PYTHONPATH": str(Path(vhpc_slurm.__file__).parents[1]),
            "SLURM_JOB_ID": str(generation.job_id),  # for hooks.log
        }
        if "VHPC_CONFIG" in os.environ:
            variables["VHPC_CONFIG"] = os.environ["VHPC_CONFIG"]
        path = self._output(layout, generation)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            output = os.open(path, flags, 0o600)
        except OSError as err:
            raise NodeError(f"cannot write {path}", err.strerror or str(err)) from err
        try:
            command = [sys.executable, *self.program, str(generation), node, begin]
            return process.spawn(command, generation=str(generation), stderr=output, variables=variables)
        finally:
            os.close(output)
