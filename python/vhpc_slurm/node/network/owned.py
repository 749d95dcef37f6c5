# SPDX-License-Identifier: Apache-2.0
"""Copies of a generation's nftables tables that ``flush ruleset`` of another program leaves in place.

A table with the flag ``owner`` belongs to the process that made it: the kernel lets no
other process change or flush it, and removes it when that process has ended. So next to
each table there is a copy of it that belongs to an ``nft -i``, which waits for commands
that never come. A packet passes both. A flush removes the one, the end of the process
removes the other; the rules are absent only if both happen before the next health check.

The process has the generation in its environment, as all helper processes, and the
name of the table.

Sources: nft(8) (flags owner), net/netfilter/nf_tables_api.c (nft_flush, nft_rcv_nl_event; Linux 5.12).
"""
# Decision: Each nftables table has a copy that a flush leaves in place

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.network import tools

VARIABLE = "VHPC_NFT_TABLE"
SUFFIX = "_owned"
FLAG = "flags owner;"
MADE_S = 10.0
POLL_S = 0.02
_MAX_OUTPUT = 4096


def name_of(table: str) -> str:
    """Name of the copy of a table."""
    return f"{table}{SUFFIX}"


def hold(generation: Generation, table: str, families: Sequence[str], commands: str) -> process.ProcessRef:
    """Start the process that has a table's copy, in place of one that may be there.

    Args:
        generation: whose.
        table: name of the table that is copied.
        families: of nftables, in which the commands make a table of this name.
        commands: for nft; they make tables called ``name_of(table)``, with ``FLAG``.

    Raises:
        NodeError: nftables or the kernel does not make it.
        TeardownError: an earlier process does not end.
    """
    with holding(generation, table, families, commands) as ref:
        return ref


@contextmanager
def holding(
    generation: Generation, table: str, families: Sequence[str], commands: str
) -> Iterator[process.ProcessRef]:
    """As ``hold``, while the caller does something else: the copy is there when the block ends."""
    end(generation, table)
    program = tools.find("nft")
    if program is None:
        raise NodeError("nft is not installed", "", "apt install nftables")
    with ExitStack() as opened:

        def closed_later(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        script = closed_later(os.memfd_create("nft-commands", 0))
        output = closed_later(os.memfd_create("nft-output"))
        # the process has both ends of its standard input, which therefore never ends
        reader, writer = map(closed_later, os.pipe())
        os.write(script, commands.encode())
        os.write(writer, f'include "/proc/self/fd/{script}"\n'.encode())
        ref = process.spawn(
            [program, "--interactive"],
            generation=str(generation),
            stderr=output,
            pass_fds=(script, writer),
            stdin=reader,
            variables={VARIABLE: table},
        )
        try:
            _group(generation, ref)
            yield ref
            _wait_made(ref, {(family, name_of(table)) for family in families}, output)
        except BaseException:
            process.end(ref)
            raise


def _wait_made(ref: process.ProcessRef, wanted: set[tuple[str, str]], output: int) -> None:
    until = time.monotonic() + MADE_S
    while not wanted <= tools.tables():
        said = os.pread(output, _MAX_OUTPUT, 0)
        if b"Error" in said or not process.alive(ref) or time.monotonic() >= until:
            raise NodeError(
                "nft does not make a table that belongs to its process",
                process.last_lines(said),
                "it needs Linux 5.12 and an nft with interactive mode",
            )
        time.sleep(POLL_S)


def _group(generation: Generation, ref: process.ProcessRef) -> None:
    """Put the process into its generation's control group, if there is one: it ends with that."""
    try:
        Cgroup.of(str(generation)).add(ref.pid)
    except OSError as err:
        raise NodeError(f"cannot put nft into the control group of {generation}", str(err)) from err


def end(generation: Generation, table: str) -> None:
    """End the process that has a table's copy, and so the copy; one that is absent is no error.

    Raises:
        TeardownError: it does not end.
    """
    for ref in list(_holders(generation, table)):
        process.end(ref)


def existing() -> frozenset[tuple[str, str]]:
    """Families and names of all copies that are in the kernel, by the names of their tables.

    Raises:
        NodeError: nftables cannot be asked.
    """
    found = tools.tables()
    return frozenset((family, name.removesuffix(SUFFIX)) for family, name in found if name.endswith(SUFFIX))


def _holders(generation: Generation, table: str) -> Iterator[process.ProcessRef]:
    wanted = f"{VARIABLE}={table}".encode()
    for ref, _ in process.marked(str(generation)):
        try:
            variables = Path(f"/proc/{ref.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if wanted in variables:
            yield ref
