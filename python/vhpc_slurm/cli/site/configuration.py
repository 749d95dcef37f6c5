# SPDX-License-Identifier: Apache-2.0
"""vhpc config: the values of the configuration, and its manual."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config, describe_tables
from vhpc_slurm.config import describe as keys_of_sections


def config(
    describe: Annotated[
        bool, typer.Option("--describe", help="Show every key, its default and its meaning.")
    ] = False,
    man: Annotated[bool, typer.Option("--man", help="Print the man page vhpc.toml(5).")] = False,
    as_json: Json = False,
) -> int:
    """Show the configuration: every key with its value."""
    if man and (describe or as_json):
        raise typer.BadParameter("--man excludes all other options")
    if man:
        sys.stdout.write(_manual())
        return 0
    if describe:
        return _reference(as_json=as_json)
    return _values(options.config(), as_json=as_json)


def _values(config: Config, *, as_json: bool) -> int:
    """Show every key with its value; ``*`` marks values that are not the default."""
    if as_json:
        output.write_json(msgspec.to_builtins(config))
        return 0
    rows = []
    for section, key, default, _ in keys_of_sections():
        value = getattr(getattr(config, section), key)
        rows.append((f"{section}.{key}", toml(value), "*" if value != default else ""))
    output.write_table(("KEY", "VALUE", "SET"), rows)
    return 0


def _reference(*, as_json: bool) -> int:
    """Show every key with its default and meaning."""
    keys = list(keys_of_sections())
    keys += [
        (table, key, None if default is msgspec.NODEFAULT else default, meaning)
        for table, _, key, default, meaning in describe_tables()
    ]
    if as_json:
        output.write_json(
            [
                {"section": section, "key": key, "default": default, "meaning": meaning}
                for section, key, default, meaning in keys
            ]
        )
        return 0
    output.write_table(
        ("KEY", "DEFAULT", "MEANING"),
        [
            (f"{section}.{key}", "-" if default is None else toml(default), meaning)
            for section, key, default, meaning in keys
        ],
    )
    return 0


def toml(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, msgspec.Struct):
        set_here = {key: one for key, one in msgspec.structs.asdict(value).items() if one not in ("", (), 0)}
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in set_here.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _manual() -> str:
    """The man page vhpc.toml(5) in man(7) markup."""
    return "\n".join([*_head(), *_sections(), *_tail()]) + "\n"


def _head() -> list[str]:
    return [
        r".\" Made by `vhpc config --man` from the code; do not edit.",
        '.TH VHPC.TOML 5 "" "vhpc" "File formats"',
        ".SH NAME",
        r"vhpc.toml \- configuration of vhpc",
        ".SH SYNOPSIS",
        ".I /etc/vhpc/vhpc.toml",
        ".SH DESCRIPTION",
        "The same file serves compute nodes and the controller.",
        "It is written in TOML, one table per section below.",
        "A key that is absent has the default that is shown;",
        "without the file, all keys have their defaults.",
        "An unknown key or a value of the wrong type is an error that names the file and the key.",
        r"Units are in the names: \fI_mib\fP is MiB, \fI_kib\fP KiB, \fI_s\fP seconds.",
        ".PP",
        r"\fBvhpc config\fP shows the values that vhpc uses.",
    ]


def _sections() -> Iterator[str]:
    last = ""
    for section, key, default, meaning in keys_of_sections():
        if section != last:
            yield f".SH [{section}]"
            yield _roff(getattr(Config(), section).__doc__ or "")
            last = section
        yield ".TP"
        yield rf"\fB{_roff(key)}\fP = {_roff(toml(default))}"
        yield _roff(meaning)
    last = ""
    for table, kind, key, default, meaning in describe_tables():
        if table != last:
            yield f".SH [[{table}]]"
            yield _roff(" ".join((kind.__doc__ or "").split()))
            last = table
        yield ".TP"
        shown = "" if default in (msgspec.NODEFAULT, None) else f" = {_roff(toml(default))}"
        yield rf"\fB{_roff(key)}\fP{shown}"
        yield _roff(meaning)


def _tail() -> list[str]:
    return [
        ".SH ENVIRONMENT",
        ".TP",
        ".B VHPC_CONFIG",
        "Path of another file to read instead; it must exist.",
        ".SH FILES",
        ".I /etc/vhpc/vhpc.toml",
        ".SH SEE ALSO",
        ".BR vhpc (1),",
        r".BR vhpc\-spank (8)",
    ]


def _roff(text: str) -> str:
    """The text with every character escaped that troff would interpret."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
