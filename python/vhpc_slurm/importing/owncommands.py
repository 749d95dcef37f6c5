# SPDX-License-Identifier: Apache-2.0
"""Slurm's commands that an image has itself, which guests cover with the site's; runs in the sandbox.

The folders are those of guest/agent/commands.c. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vhpc_slurm.importing.tree import Node, Tree

COMMANDS_LABEL = "vhpc/covered-commands"
"""Label: the image's own files that the site's commands cover in guests."""
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
AGENT = "/run/vhpc/vhpc-agent"
"""Target of the links that the agent makes, which saved guests have."""
PATHS_MAX = 1024
"""Characters of a label."""


def own_commands(tree: Tree, names: Sequence[str], path: str) -> list[str]:
    """Paths of an image's own commands with some names.

    Args:
        tree: the files of the image.
        names: those that run on the host: ``host.commands``.
        path: PATH of the image's environment; its folders come first, as in a guest.

    Returns:
        A path for each file, in the order of the search. Links that lead to nothing, to the agent or to a
        program of another name are left out.
    """
    listed = [folder.rstrip("/") for folder in path.split(":") if folder.startswith("/")]
    found: dict[int, str] = {}
    for folder in dict.fromkeys((*listed, *FOLDERS)):
        if ".." in folder.split("/"):
            continue
        for name in names:
            at = f"{folder}/{name}"
            first, node = tree.find(at), tree.find_file(at)
            if first is None or node is None or node.content is None or _is_of_another(first, name):
                continue
            if at.isprintable():
                found.setdefault(id(node), at)
    return list(found.values())


def _is_of_another(first: Node, name: str) -> bool:
    """Whether a link leads to the agent, or to a program that is not this command alone."""
    base = (first.target or name).rpartition("/")[2]
    return first.target == AGENT or not base.startswith(name) or base[len(name) :][:1].isalnum()


def told(paths: Sequence[str]) -> str:
    """One line for the user that names these files; empty without files."""
    if not paths:
        return ""
    return f"in guests the site's commands cover those of the image: {_cut(paths)}"


def covered_label(found: dict[str, Any]) -> dict[str, str]:
    """The label for a manifest, from the worker's result; empty without such files."""
    paths = _cut([str(path) for path in found.get("own_commands") or ()])
    return {COMMANDS_LABEL: paths} if paths else {}


def _cut(paths: Sequence[str]) -> str:
    text = ", ".join(paths)
    return text if len(text) <= PATHS_MAX else text[: PATHS_MAX - 1] + "…"
