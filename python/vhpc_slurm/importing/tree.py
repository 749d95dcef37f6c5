# SPDX-License-Identifier: Apache-2.0
"""The file system of a container, in memory: names and attributes; contents stay where they are.

Layers are applied as the OCI image specification says ("Image Layer Filesystem Changeset"):
an entry replaces what had its name, ``.wh.NAME`` removes a name of lower layers,
``.wh..wh..opq`` removes all lower content of a folder. Parents that are links are followed
inside the tree, as container runtimes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

WHITEOUT = ".wh."
RESERVED = ".wh..wh."
OPAQUE = ".wh..wh..opq"
NAME_MAX, PATH_MAX, LINKS_MAX = 255, 4096, 40
"""Limits of Linux: bytes of a name and of a path, links followed on the way to a file."""


class RefusedError(Exception):
    """The source cannot be imported; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes of a file: ``size`` bytes, which are zero except for ``pieces``.

    A piece is an offset in the file, an offset in the source and a length. ``source`` is the
    number of a layer, or the path of a file.
    """

    source: int | str
    size: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(eq=False, slots=True)
class Node:
    """A folder (``children``), link (``target``) or file (``content``); ``mode`` without the type.

    A file with several names is one node. ``layer`` is the last layer that had it.
    """

    layer: int
    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    xattrs: dict[str, str] = field(default_factory=dict)
    children: dict[str, Node] | None = None
    target: str | None = None
    content: Content | None = None


def folder(layer: int, mode: int = 0o755) -> Node:
    """An empty folder of root's."""
    return Node(layer, mode, children={})


def parts(path: str) -> list[str]:
    """The names in a path of an archive.

    Raises:
        RefusedError: a name or the path is too long, or it leads out of the tree.
    """
    if len(path.encode("utf-8", "surrogateescape")) > PATH_MAX:
        raise RefusedError(f"a path has more than {PATH_MAX} bytes: {path[:80]!r}…")
    found = [name for name in path.split("/") if name not in {"", "."}]
    for name in found:
        if name == "..":
            raise RefusedError(f"the path {path!r} leads out of the image")
        if len(name.encode("utf-8", "surrogateescape")) > NAME_MAX:
            raise RefusedError(f"a name has more than {NAME_MAX} bytes: {name[:80]!r}…")
        if "\0" in name:
            raise RefusedError(f"the path {path!r} has a NUL")
    return found


class Tree:
    """A file system that layers are applied to, the lowest one first."""

    def __init__(self, max_nodes: int) -> None:
        self.root = folder(0)
        self._max_nodes = max_nodes
        self._nodes = 0

    def put(self, path: str, node: Node) -> None:
        """Add a file, link or folder, or replace the one of that name.

        Raises:
            RefusedError: a part of the path is a file, or the tree has too many nodes.
        """
        names = parts(path)
        if not names:
            if node.children is not None:
                _take_attributes(self.root, node)
            return
        parent = self._parent(path, names, node.layer)
        old = parent.get(names[-1])
        if old is not None and old.children is not None and node.children is not None:
            _take_attributes(old, node)
            return
        self._count()
        parent[names[-1]] = node

    def has(self, path: str) -> bool:
        """Whether there is something at a path; a link at its end is not followed."""
        return self.find(path) is not None

    def find(self, path: str) -> Node | None:
        """The node at a path; links on the way are followed, a link at its end is not."""
        return self._lookup(path, parts(path))

    def find_file(self, path: str) -> Node | None:
        """The node at a path; all links are followed. None also if there are too many of them."""
        try:
            return self._follow(path, parts(path), None)
        except RefusedError:
            return None

    def link(self, path: str, target: str, layer: int) -> None:
        """Add another name of a file.

        Raises:
            RefusedError: the other file does not exist or is a folder; and as ``put``.
        """
        wanted = parts(target)
        found = self._lookup(target, wanted)
        if found is None or found.children is not None:
            raise RefusedError(f"{path!r} is a hard link to {target!r}, which is not a file of the image")
        names = parts(path)
        if not names:
            raise RefusedError("the root of the image is a hard link")
        self._count()
        # as in overlayfs, a file of a lower layer that gets another name is a copy
        node = found if found.layer == layer else replace(found, layer=layer)
        self._parent(path, names, layer)[names[-1]] = node

    def whiteout(self, path: str, layer: int) -> None:
        """Apply a whiteout: what it names of lower layers is removed; errors as ``put``."""
        *above, name = parts(path)
        parent = self._follow(path, above, None)
        if parent is None or parent.children is None:
            return
        if name == OPAQUE:
            _prune(parent, layer)
        elif not name.startswith(RESERVED):
            hidden = name.removeprefix(WHITEOUT)
            node = parent.children.get(hidden)
            if node is not None and node.layer < layer:
                del parent.children[hidden]
            elif node is not None and node.children is not None:
                _prune(node, layer)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """All paths below the root with their nodes, sorted, folders before their content."""
        stack = [iter(sorted((self.root.children or {}).items()))]
        names: list[str] = []
        while stack:
            try:
                name, node = next(stack[-1])
            except StopIteration:
                stack.pop()
                if names:
                    names.pop()
                continue
            yield "/".join([*names, name]), node
            if node.children:
                names.append(name)
                stack.append(iter(sorted(node.children.items())))

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > self._max_nodes:
            raise RefusedError(f"it has more than {self._max_nodes} files")

    def _parent(self, path: str, names: list[str], layer: int) -> dict[str, Node]:
        """The content of the folder that an entry is in; missing folders are made."""
        node = self._follow(path, names[:-1], layer)
        if node is None or node.children is None:
            raise RefusedError(f"a part of the path {path!r} is not a folder")
        return node.children

    def _lookup(self, path: str, names: list[str]) -> Node | None:
        """The node of a path; a link at its end is not followed."""
        if not names:
            return self.root
        above = self._follow(path, names[:-1], None)
        return None if above is None or above.children is None else above.children.get(names[-1])

    def _follow(self, path: str, names: list[str], layer: int | None) -> Node | None:
        """The folder that names lead to; ``layer``: in which missing ones are made, None: not at all."""
        above: list[Node] = [self.root]
        todo, links = list(reversed(names)), 0
        while todo:
            name = todo.pop()
            if name == "..":
                above = above[:-1] or [self.root]
                continue
            children = above[-1].children
            if children is None:
                return None
            child = children.get(name)
            if child is None:
                if layer is None:
                    return None
                self._count()
                child = children[name] = folder(layer)
            if child.target is not None:
                links += 1
                if links > LINKS_MAX:
                    raise RefusedError(f"the path {path!r} leads through too many links")
                if child.target.startswith("/"):
                    above = [self.root]
                todo.extend(reversed([part for part in child.target.split("/") if part not in {"", "."}]))
                continue
            above.append(child)
            if layer is not None and child.children is not None:
                child.layer = layer  # it has content of this layer, which a whiteout in it must not remove
        return above[-1]


def _take_attributes(old: Node, new: Node) -> None:
    old.layer, old.mode, old.uid, old.gid = new.layer, new.mode, new.uid, new.gid
    old.mtime, old.xattrs = new.mtime, new.xattrs


def _prune(top: Node, layer: int) -> None:
    """Remove what lower layers put into a folder."""
    stack = [top]
    while stack:
        node = stack.pop()
        assert node.children is not None
        node.children = {name: child for name, child in node.children.items() if child.layer >= layer}
        stack += [child for child in node.children.values() if child.children is not None]
