"""vhpc fabric: partition keys as vhpcd's database has them, and OpenSM's partitions file."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from vhpc_slurm.cli import output
from vhpc_slurm.config import Config
from vhpc_slurm.controller.keystore import read_book
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric import keys, partitions
from vhpc_slurm.fabric.select import backend, site_partitions, static_pool

MAX_FILE = 256 << 20
"""Bytes of the largest partitions file that is looked at; a pool of a million GUIDs has 26 MB."""


def ls(config: Config, *, as_json: bool) -> int:
    """List claims."""
    book = read_book(config.controller.database)
    if as_json:
        claims = [
            {
                "pkey": f"{one.pkey:#06x}",
                "state": one.state,
                "generation": str(one.generation),
                "owner": one.owner,
                "first_rank": one.first_rank,
                "ranks": one.ranks,
                "rails": one.rails,
                "vfs": one.vfs,
                "left_s": one.left_s,
                "note": one.note,
            }
            for one in book.claims
        ]
        output.write_json({"epoch": book.epoch, "claims": claims})
        return 0
    rows = []
    for one in book.claims:
        note = one.note or (f"for {output.span(one.left_s)}" if one.state is keys.KeyState.QUARANTINE else "")
        ports = str(one.ranks * one.rails * one.vfs)
        rows.append((f"{one.pkey:#06x}", one.state.value, str(one.generation), one.owner, ports, note))
    output.write_table(("PKEY", "STATE", "GENERATION", "OWNER", "PORTS", "NOTE"), rows, right=("PORTS",))
    return 0


def audit(config: Config, *, as_json: bool) -> int:
    """Compare."""
    # Nothing is written here, so nobody has to know whose the file is.
    found = backend(config.fabric, lambda _epoch, _tag: False).audit(read_book(config.controller.database))
    if as_json:
        findings = [
            {"port_guid": f"{one.port_guid:#018x}" if one.port_guid else None, "what": one.what}
            for one in found
        ]
        output.write_json({"findings": findings})
    else:
        for one in found:
            print(output.printable(one.what))
    return 1 if found else 0


def render(config: Config, *, pool: bool, as_json: bool) -> int:
    """Print the file."""
    fabric = config.fabric
    book = keys.Book(0) if pool else read_book(config.controller.database)
    found = static_pool(fabric) if pool else partitions.of_book(book, ipoib=fabric.ipoib)
    found = (*found, *site_partitions(fabric))
    if as_json:
        output.write_json(
            {
                "epoch": book.epoch,
                "partitions": [
                    {
                        "name": one.name,
                        "pkey": f"{one.pkey:#06x}",
                        "flags": one.flags,
                        "members": {member: "full" if full else "limited" for member, full in one.members},
                    }
                    for one in found
                ],
            }
        )
        return 0
    sys.stdout.write(partitions.render(found, book.epoch, book.tag).decode())
    return 0


def lint(file: str, *, as_json: bool) -> int:
    """Check a file."""
    defects = partitions.lint(_read(file))
    if as_json:
        output.write_json({"file": file, "defects": defects})
    else:
        for defect in defects:
            print(f"{output.printable(file)}:{defect.line}: {output.printable(defect.reason)}")
    return 1 if defects else 0


def _read(file: str) -> bytes:
    try:
        # Not to wait for a writer of what may be a pipe.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise UserError(f"cannot read {Path(file)}", "it is no plain file")
            data = opened.read(MAX_FILE + 1)
    except OSError as err:
        raise UserError(f"cannot read {file}", err.strerror or str(err)) from err
    if len(data) > MAX_FILE:
        raise UserError(f"{file} is no partitions file", f"it has more than {MAX_FILE} bytes")
    return data
