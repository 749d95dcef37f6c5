# SPDX-License-Identifier: Apache-2.0
"""The interface of each kind of resource."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.checked import CheckResult
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout

Result = tuple[Entry, Exception | None]
"""An entry, and why it was not released; None if it was."""


class Resource(ABC):
    """A kind of resource of a node.

    Each kind also has a method ``take``, whose arguments differ: it writes the entry to the journal, and
    then takes the resource.  It raises what ``Journal.acquire`` raises, too.  A process can be killed
    between any two steps, so a release must also cope with a resource that was announced and never taken.
    """

    kind: ClassVar[str]
    """Its name in journals, those of earlier versions included."""

    @abstractmethod
    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Release a resource; idempotent, and returns only when the resource is free.

        Raises:
            VhpcError, OSError: it is not free, or the entry cannot be used.
        """

    def release_each(
        self, layout: Layout, generation: Generation, entries: Sequence[Entry]
    ) -> Iterator[Result]:
        """Release resources that were taken together, one after the other; yields the result of each."""
        for entry in entries:
            yield self.release_one(layout, generation, entry)

    def release_one(self, layout: Layout, generation: Generation, entry: Entry) -> Result:
        """Release a resource; the result has the error."""
        try:
            self.release(layout, generation, entry)
        except (VhpcError, OSError) as err:
            return entry, err
        return entry, None

    def orphans(self, layout: Layout) -> Iterable[NodeFinding]:
        """Resources of this kind that no journal has; none if the kind leaves nothing on a node."""
        del layout
        return ()

    def check(self, config: Config, node: str, *, root: bool) -> Iterable[CheckResult]:
        """What `vhpc doctor` says of this kind on a node; nothing if the site does not use it.

        ``root``: whether what only root can do is tried.
        """
        del config, node, root
        return ()

    def entries(self, layout: Layout) -> Iterator[tuple[Generation, Entry]]:
        """Entries of this kind in all journals of the node.

        Raises:
            NodeError: a journal cannot be read.
        """
        for generation in journal.generations(layout.journals):
            for entry in journal.read_entries(layout.journals, generation):
                if entry.kind == self.kind:
                    yield generation, entry


def is_known(layout: Layout, name: str) -> bool:
    """Whether a generation of this name has a journal now."""
    return name in {str(generation) for generation in journal.generations(layout.journals)}


def unless(owned: Callable[[], bool], repair: Callable[[], object]) -> Callable[[], object]:
    """Repair only if the resource still has no owner when the repair runs.

    A job may boot meanwhile.  Prolog writes a resource to the journal before it takes the resource, so
    orphans are listed first, the journals are read afterwards, and once more before anything is removed.
    """

    def act() -> None:
        if not owned():
            repair()

    return act


def orphan_of(
    layout: Layout, name: str, kind: Kind, what: str, repair: Callable[[], object]
) -> Iterator[NodeFinding]:
    """The finding about a resource of the generation ``name``, if that has no journal."""
    if not is_known(layout, name):
        yield NodeFinding(kind, what, unless(partial(is_known, layout, name), repair))
