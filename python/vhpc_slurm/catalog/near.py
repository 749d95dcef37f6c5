# SPDX-License-Identifier: Apache-2.0
"""Names that no image has: which ones the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

NEAR_NAMES = 3
PART = 3
"""Characters of a part of a name that make it similar: ``hpc`` of ``debian-hpc``."""


class UnknownImageError(UserError):
    """A catalogue has no image of a name."""

    def __init__(self, ref: ImageRef, known: Iterable[ImageRef], empty: str = "") -> None:
        """The error.

        Args:
            ref: the name.
            known: names that exist, of the catalogue or of several.
            empty: names the catalogue, if it has no image at all.
        """
        self._ref, self._known, self._empty = ref, tuple(known), empty
        near = _near(ref, self._known)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        if ref.own:
            hint += f"see: vhpc image ls --own; make it: vhpc image import SOURCE {ref.label}"
        else:
            hint += "see: vhpc image ls" if near or not empty else "ask your operator"
        super().__init__(f"image {ref} is unknown", f"{empty} is empty" if empty else "", hint)

    def among(self, more: Iterable[ImageRef]) -> UnknownImageError:
        """The same error, with names of another catalogue."""
        return UnknownImageError(self._ref, (*self._known, *more), self._empty)

    @property
    def own(self) -> bool:
        """Whether the catalogue is the user's own."""
        return self._ref.own


def _near(ref: ImageRef, known: tuple[ImageRef, ...]) -> list[str]:
    """Labels to suggest: other tags of the name, the name in another catalogue, similar names.

    Tags are not compared: all names would look similar, because most tags are ``latest``.
    """
    import difflib  # hooks import this module, and seldom need that one

    tags = [other.label for other in known if (other.name, other.own) == (ref.name, ref.own)]
    if tags:
        return tags[:NEAR_NAMES]
    found = dict.fromkeys(_of_names([ref.name], ref, known))
    names = list(dict.fromkeys(other.name for other in known))
    similar = [name for name in names if len(ref.name) >= PART and ref.name in name]
    similar += difflib.get_close_matches(ref.name, names, n=NEAR_NAMES)
    found |= dict.fromkeys(_of_names(similar, ref, known))
    return list(found)[:NEAR_NAMES]


def _of_names(names: list[str], ref: ImageRef, known: tuple[ImageRef, ...]) -> Iterator[str]:
    """One label of each name and catalogue: with the tag that was asked for, if there is one."""
    for name in names:
        for own in (ref.own, not ref.own):
            tags = [other for other in known if (other.name, other.own) == (name, own)]
            if tags:
                yield next((other for other in tags if other.tag == ref.tag), tags[0]).label
