# SPDX-License-Identifier: Apache-2.0
"""Starts the process that saves the guests of a job, where checkpoints are on.

It needs root's rights for libvirt, so vhpc-confine does not start it. It is not in the control group of
the generation, whose memory belongs to the guests' daemons; like all helpers it has its own session,
and slurmd's unit has ``KillMode=process``, so slurmd and systemd do not end it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import vhpc_slurm
from vhpc_slurm import files
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, NodePlan
from vhpc_slurm.node.checkpoint.facts import is_saveable
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")
ROLE = "keeper"
PROGRAM = ("-P", "-s", "-m", "vhpc_slurm.hooks.start", "vhpc_slurm.hooks.keeper")


def start(layout: Layout, journal: Journal, plan: NodePlan) -> None:
    """Start the keeper of a job whose guests run, if the job can be saved; without it the job runs as well.

    Raises:
        NodeError, FabricError: the journal cannot be written.
        Stopped: the job has ended meanwhile.
    """
    if not is_saveable(layout.config, plan.guests):
        return
    key = Process().announce(journal, ROLE, ROLE)
    try:
        ref = _spawn(layout, journal.generation, plan.node, "run")
    except NodeError as err:
        log.error("the job cannot be saved on this node: %s", err.line())
        journal.released(key)
        return
    Process().note(journal, key, ref)


def start_again(layout: Layout, journal: Journal, entry: Entry, node: str) -> ProcessRef:
    """Start the keeper of a job in the place of one that has ended; it asks vhpcd what the guests shall do.

    Raises:
        NodeError: it cannot be started, or the journal cannot be written.
        FabricError: the file system of the journal is full.
    """
    ref = _spawn(layout, journal.generation, node, "ask")
    Process().note(journal, entry.key, ref)
    return ref


def entry_of(held: Sequence[Entry]) -> Entry | None:
    """The keeper's entry in a journal; None if the job has none."""
    mine = (entry for entry in held if entry.kind == Process.kind)
    return next((entry for entry in mine if entry.read(ProcessData).role == ROLE), None)


def lives(layout: Layout, generation: Generation, entry: Entry) -> bool:
    """Whether the keeper runs, or has nothing more to do; also one that the journal does not know yet."""
    if layout.keeper_over(generation.job_id).exists():
        return True
    ref = entry.read(ProcessData).ref
    return (ref is not None and process.alive(ref)) or works(layout, generation)


def works(layout: Layout, generation: Generation) -> bool:
    """Whether a keeper of the job has begun its work."""
    return files.is_locked(layout.keeper_lock(generation.job_id))


def said(layout: Layout, generation: Generation) -> str:
    """The last lines of a keeper that did not start."""
    try:
        return process.last_lines(_output(layout, generation).read_bytes()[-4096:])
    except OSError:
        return ""


def _output(layout: Layout, generation: Generation) -> Path:
    """The file for what Python writes if the keeper's program fails."""
    return layout.job(generation.job_id) / "keeper.log"


def _spawn(layout: Layout, generation: Generation, node: str, begin: str) -> ProcessRef:
    """Start it; its messages are in hooks.log."""
    variables = {
        "PYTHONPATH": str(Path(vhpc_slurm.__file__).parents[1]),
        "SLURM_JOB_ID": str(generation.job_id),  # for hooks.log
    }
    if "VHPC_CONFIG" in os.environ:
        variables["VHPC_CONFIG"] = os.environ["VHPC_CONFIG"]
    path = _output(layout, generation)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        output = os.open(path, flags, 0o600)
    except OSError as err:
        raise NodeError(f"cannot write {path}", err.strerror or str(err)) from err
    try:
        command = [sys.executable, *PROGRAM, str(generation), node, begin]
        return process.spawn(command, generation=str(generation), stderr=output, variables=variables)
    finally:
        os.close(output)
