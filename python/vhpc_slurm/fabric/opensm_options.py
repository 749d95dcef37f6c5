# SPDX-License-Identifier: Apache-2.0
"""The options of a running OpenSM, from its command line and its configuration file.

Names and defaults are those that ``opensm --create-config`` of OpenSM 3.3.23 writes;
the command line overrides the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import FabricError

CONFIG = "/etc/opensm/opensm.conf"
DEFAULTS = {
    "allow_both_pkeys": "FALSE",
    "force_log_flush": "FALSE",
    "keep_pkey_indexes": "TRUE",
    "log_file": "/var/log/opensm.log",
    "m_key": "0x0000000000000000",
    "m_key_protection_level": "0",
    "no_partition_enforcement": "FALSE",
    "part_enforce": "both",
    "partition_config_file": "/etc/opensm/partitions.conf",
    "sa_key": "0x0000000000000001",
    "sm_key": "0x0000000000000001",
}
_VALUES = {
    "-F": "config",
    "--config": "config",
    "-P": "partition_config_file",
    "--Pconfig": "partition_config_file",
    "-f": "log_file",
    "--log_file": "log_file",
    "-Z": "part_enforce",
    "--part_enforce": "part_enforce",
}
_SWITCHES = {"-W": "allow_both_pkeys", "--allow_both_pkeys": "allow_both_pkeys"}


@dataclass(frozen=True)
class OpensmOptions:
    """Options by name; paths are absolute."""

    values: Mapping[str, str]
    config: str

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def on(self, name: str) -> bool:
        """Whether a switch is TRUE."""
        return self.values[name].upper() in ("TRUE", "1", "YES")

    def number(self, name: str) -> int:
        """A number as OpenSM reads it; -1 where it is not a number."""
        try:
            return int(self.values[name], 0)
        except ValueError:
            return -1


def of_process(pid: int) -> OpensmOptions:
    """The options of a process.

    Raises:
        FabricError: it has ended, belongs to another user, or its file cannot be read.
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
        folder = Path(f"/proc/{pid}/cwd").readlink()
    except OSError as err:
        raise FabricError(f"cannot read the options of process {pid}", err.strerror or str(err)) from err
    said = parse_arguments(arguments)
    config = said.pop("config", "")
    path = folder / (config or CONFIG)
    try:
        file = parse_file(path.read_text(errors="replace"))
    except FileNotFoundError:
        if config:
            raise FabricError(
                f"cannot read {path}", "OpenSM's command line names it, and it does not exist"
            ) from None
        file = {}
    except OSError as err:
        raise FabricError(f"cannot read {path}", err.strerror or str(err)) from err
    values = DEFAULTS | {name: value for name, value in file.items() if name in DEFAULTS} | said
    for name in ("log_file", "partition_config_file"):
        values[name] = str(folder / values[name])
    return OpensmOptions(values, str(path) if file else "")


def parse_arguments(arguments: list[str]) -> dict[str, str]:
    """The options that a command line sets."""
    found = {}
    for place, word in enumerate(arguments[1:], 1):
        name, equals, value = word.partition("=")
        if name in _VALUES and (equals or place + 1 < len(arguments)):
            found[_VALUES[name]] = value if equals else arguments[place + 1]
        elif word[:2] in _VALUES and not word.startswith("--") and len(word) > 2:
            found[_VALUES[word[:2]]] = word[2:]
        elif word in _SWITCHES:
            found[_SWITCHES[word]] = "TRUE"
    return found


def parse_file(text: str) -> dict[str, str]:
    """Names and values of a configuration file: one per line, ``#`` begins a comment."""
    found = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split(None, 1)
        if len(words) == 2:
            found[words[0]] = words[1].strip()
    return found
