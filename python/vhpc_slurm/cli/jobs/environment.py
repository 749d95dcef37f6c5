# SPDX-License-Identifier: Apache-2.0
"""vhpc environment: the options of an environment file."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.source import is_source
from vhpc_slurm.model import ImageRef
from vhpc_slurm.options import IMAGE, SAVE, Option, ValueRefusedError, parse_environment

LARGEST = 64 << 10
"""Bytes of an environment file."""


def environment(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A table of TOML.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Print the options of a file for sbatch --vhpc-environment, or the line of it that is wrong.

    The keys of the file are names of options without --vhpc-; vhpc-spank(8) has all of them:

    \b
      image = "debian-hpc"
      guests-per-node = 2
      mount = ["/project/lab/data:/data:ro"]
      env.OMP_PLACES = "cores"
    """
    found = read(file)
    if as_json:
        output.write_json({option.name: text for option, text in found})
    else:
        for option, text in found:
            print(f"--vhpc-{option.name}={text}")
    return 0


def read(file: str) -> list[tuple[Option, str]]:
    """The options of a file with their values as a user writes them.

    Raises:
        UserError: the file cannot be read, or is wrong.
    """
    try:
        with open(file, "rb") as opened:  # noqa: PTH123 - messages have the path as the user wrote it
            data = opened.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UserError(f"{file} is no environment file", f"it is larger than {LARGEST >> 10} KiB")
        found = parse_environment(data.decode())
    except OSError as err:
        raise UserError(f"cannot read {file}", err.strerror or str(err)) from err
    except UnicodeDecodeError as err:
        raise UserError(f"{file} is no environment file", "it is not UTF-8") from err
    except ValueRefusedError as err:
        raise UserError(f"{file} is no environment file", str(err), "see: vhpc environment --help") from err
    for option, text in found:
        if option in (IMAGE, SAVE) and not is_source(text):
            ImageRef.parse(text)
    return found
