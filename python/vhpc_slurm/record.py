# SPDX-License-Identifier: Apache-2.0
"""Records: classes of values that are compared and copied, which Python makes fast.

A dataclass costs 0.3 ms of CPU time when its module is imported, because Python compiles
its methods; a Struct of msgspec costs a fortieth.  Hooks import a hundred and more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import Struct


class _Fields:
    """The attribute for ``dataclasses.replace``, ``asdict`` and ``fields``; made when one of them is
    called."""

    def __get__(self, record: object, kind: type[Struct]) -> dict[str, Any]:
        return _fields(kind)


@cache
def _fields(kind: type[Struct]) -> dict[str, Any]:
    import dataclasses

    made: Any = dataclasses.make_dataclass(kind.__name__, kind.__struct_fields__)
    fields: dict[str, Any] = made.__dataclass_fields__
    return fields


class Record(Struct, frozen=True):
    """A frozen Struct for ``dataclasses.replace``, ``asdict`` and ``fields``, whose use mypy checks."""

    __dataclass_fields__ = _Fields()


def prepare(*kinds: type[Struct]) -> None:
    """Have msgspec examine classes of records before threads decode them; without any, all that are imported.

    It does so when a class is decoded for the first time; two threads that do this at once crash the process.
    """
    from msgspec.json import Decoder

    for kind in kinds or _below(Struct):
        # what msgspec cannot decode, nothing decodes
        with contextlib.suppress(TypeError, NameError):
            Decoder(kind)


def _below(kind: type[Struct]) -> Iterator[type[Struct]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)
