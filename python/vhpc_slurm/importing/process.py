# SPDX-License-Identifier: Apache-2.0
"""The command of a container: for the manifest, and as files of the root; runs in the sandbox."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vhpc_slurm.importing.tree import Content, Node, RefusedError, Tree, folder
from vhpc_slurm.terminal import one_line

ENVIRONMENT_FILE, ENTRYPOINT_FILE = "etc/vhpc/container-environment", "etc/vhpc/entrypoint"
ENVIRONMENT_MAX, VARIABLES_MAX = 131072, 512
SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can have and UTF-8 cannot."""
LABEL = re.compile(r"[a-z0-9][a-z0-9._/-]*\Z", re.ASCII)
LABEL_KEY_MAX, LABEL_MAX, LABELS_MAX = 128, 1024, 48
"""Of a manifest; which can have 64 labels in all."""
NAMED = 3
"""Labels or variables that a line names."""
OF_VHPC = "vhpc/"
VARIABLE_NAME_MAX, VARIABLE_MAX = 128, 32768
"""Characters of a variable's name and of its value, in a manifest."""


def process_of(config: dict[str, Any]) -> dict[str, Any]:
    """The command in a container's configuration, with the manifest's keys.

    Raises:
        RefusedError: it is not a configuration.
    """
    wanted = config.get("config")
    if wanted is None:
        return {}
    if not isinstance(wanted, dict):
        raise RefusedError("its configuration has no valid 'config'")
    return {
        "entrypoint": _texts(wanted, "Entrypoint"),
        "arguments": _texts(wanted, "Cmd"),
        "environment": dict(pair for pair in _variables(config) if _can_be_set(*pair)),
        "user": _text(wanted, "User"),
        "working_dir": _text(wanted, "WorkingDir"),
    }


def _variables(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a container's environment; an entry without ``=`` sets nothing."""
    wanted = config.get("config")
    listed = wanted.get("Env") if isinstance(wanted, dict) else None
    if not isinstance(listed, list | None):
        raise RefusedError("its configuration has no valid 'Env'")
    parted = (str(text).partition("=") for text in listed or ())
    return [(name, value) for name, equals, value in parted if equals]


def _can_be_set(name: str, value: str) -> bool:
    """Whether a guest can have a variable: execve takes any name, and values of several lines."""
    fits = 0 < len(name) <= VARIABLE_NAME_MAX and len(value) <= VARIABLE_MAX
    return fits and name.isprintable() and "\0" not in value and not SURROGATE.search(value)


def left_out_variables(config: dict[str, Any]) -> str:
    """One line on variables that ``process_of`` leaves out, of at most 200 characters; empty: none."""
    names = [name for name, value in _variables(config) if not _can_be_set(name, value)]
    rules = (
        f"a name has 1 to {VARIABLE_NAME_MAX} printable characters, a value at most {VARIABLE_MAX >> 10} KiB"
    )
    return _left_out("variable", names, rules)


def _left_out(kind: str, names: list[str], rules: str) -> str:
    if not names:
        return ""
    named = ", ".join(repr(one_line(name)[:30]) for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    plural = "s" if len(names) > 1 else ""
    return f"left out {len(names)} {kind}{plural}: {named}{more} ({rules})"


def labels_of(config: dict[str, Any]) -> dict[str, str]:
    """A container's labels, as far as a manifest can have them; those of vhpc say what vhpc has done.

    Left out are labels with other keys, such as with capital letters, and with values of more than a line.
    """
    wanted = config.get("config")
    found = wanted.get("Labels") if isinstance(wanted, dict) else None
    labels = {
        key: text
        for key, text in sorted(found.items() if isinstance(found, dict) else ())
        if isinstance(text, str)
        and LABEL.match(key)
        and len(key) <= LABEL_KEY_MAX
        and len(text) <= LABEL_MAX
        and not key.startswith(OF_VHPC)
        and text.isprintable()
    }
    return dict(itertools.islice(labels.items(), LABELS_MAX))


def left_out_labels(config: dict[str, Any]) -> str:
    """One line on labels that ``labels_of`` leaves out, of at most 200 characters; empty: none."""
    wanted = config.get("config")
    found = wanted.get("Labels") if isinstance(wanted, dict) else None
    kept = labels_of(config)
    keys = sorted(str(key) for key in (found if isinstance(found, dict) else ()))
    keys = [key for key in keys if key not in kept and not key.startswith(OF_VHPC)]
    return _left_out("label", keys, f"a key has a-z, 0-9 and ._/-, a value one line; at most {LABELS_MAX}")


def created_of(config: dict[str, Any]) -> str:
    """When a container was made, as UTC (``2026-11-23T03:24:56Z``); empty if it does not say when.

    Builders that want equal bytes write the beginning of time or of the epoch, which says nothing.
    """
    found = config.get("created")
    try:
        when = datetime.fromisoformat(found if isinstance(found, str) else "")
        if when.tzinfo is None or when.timestamp() <= 0:
            return ""
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        return ""


def _text(of: dict[str, Any], key: str) -> str:
    found = of.get(key)
    if not isinstance(found, str | None):
        raise RefusedError(f"its configuration has no valid {key!r}")
    return found or ""


def _texts(of: dict[str, Any], key: str) -> list[str]:
    found = of.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise RefusedError(f"its configuration has no valid {key!r}")
    return found


def put_files(tree: Tree, process: dict[str, Any], out: Path, layer: int) -> None:
    """Put the files into a tree that tell a guest the container's environment and command.

    ``/etc/vhpc/container-environment`` is what the guest's agent reads (guest/agent/imageenv.h);
    ``/etc/vhpc/entrypoint`` is a script for users: it starts what a container runtime would start.

    Args:
        tree: the files of the container.
        process: what ``process_of`` found.
        out: folder for the contents.
        layer: number of the layer that the files belong to.

    Raises:
        RefusedError: a variable or an argument cannot be in such a file.
    """
    if process.get("environment"):
        data = _environment(process["environment"])
        _put(tree, ENVIRONMENT_FILE, 0o644, data, out / "environment", layer)
    entrypoint, arguments = process.get("entrypoint") or [], process.get("arguments") or []
    place = process.get("working_dir") or ""
    if SURROGATE.search(place):
        raise RefusedError(f"its working directory {place[:80]!r} cannot be a path")
    with contextlib.suppress(RefusedError):  # it is no valid path, or a part of it is a file or a link
        if place.strip("/") and not tree.has(place):
            tree.put(place, folder(layer))  # container runtimes make it, too
    if entrypoint or arguments:
        data = _entrypoint(entrypoint, arguments, place)
        _put(tree, ENTRYPOINT_FILE, 0o755, data, out / "entrypoint", layer)


def _put(tree: Tree, path: str, mode: int, data: bytes, file: Path, layer: int) -> None:
    file.write_bytes(data)
    content = Content(str(file), len(data), ((0, 0, len(data)),))
    tree.put(path, Node(layer, mode, content=content))


def _environment(variables: dict[str, str]) -> bytes:
    data = "".join(f"{name}={value}\0" for name, value in variables.items()).encode()
    if len(data) > ENVIRONMENT_MAX or len(variables) > VARIABLES_MAX:
        raise RefusedError(
            f"its environment has more than {VARIABLES_MAX} variables or {ENVIRONMENT_MAX >> 10} KiB"
        )
    return data


def _change_to(place: str) -> str:
    if not place:
        return ""
    said = shlex.quote(
        f"vhpc: the working directory {one_line(place)} of the container cannot be entered; staying in"
    )
    return f'cd {shlex.quote(place)} 2>/dev/null || echo {said} "$PWD" >&2\n'


def _entrypoint(entrypoint: list[str], arguments: list[str], place: str) -> bytes:
    """A script: arguments of the caller take the place of the container's, as in container runtimes.

    It starts in the container's working directory, if the job's user may enter it: containers that
    run as root often have /root.
    """
    for text in (*entrypoint, *arguments, place):
        if "\0" in text or SURROGATE.search(text):
            raise RefusedError(f"its entrypoint has {text[:80]!r}, which cannot be an argument")
    return (
        "#!/bin/sh\n"
        "# What the container of this image starts; arguments replace those of the container.\n"
        f"{_change_to(place)}"
        f"[ $# -gt 0 ] || set -- {shlex.join(arguments)}\n"
        f'exec {shlex.join(entrypoint)} "$@"\n'
    ).encode()
