# SPDX-License-Identifier: Apache-2.0
"""Renders the concerns of a domain in a fixed order, so that equal specs give equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import DictLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from msgspec import Struct

from vhpc_slurm.domain import (
    boot,
    capabilities,
    cpu,
    cputune,
    disk,
    features,
    hostdev,
    identity,
    iommu,
    locks,
    memory,
    nat,
    nic,
    numatune,
    pci,
    plain,
    shares,
    site,
)
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

Context = Callable[[DomainSpec], Struct | None]


class Concern(Record, frozen=True):
    """One part of a domain: its template's name, and what fills it."""

    name: str
    context: Context


DOMAIN = (
    Concern("identity", identity.context),
    Concern("memory", memory.context),
    Concern("cputune", cputune.context),
    Concern("numatune", numatune.context),
    Concern("boot", boot.context),
    Concern("features", features.context),
    Concern("cpu", cpu.context),
    Concern("clock", plain.context),
    Concern("lifecycle", plain.context),
)
DEVICES = (
    Concern("machine", plain.context),
    Concern("iommu", iommu.context),
    Concern("pci", pci.context),
    Concern("disk", disk.context),
    Concern("shares", shares.context),
    Concern("nic", nic.context),
    Concern("nat", nat.context),
    Concern("site", site.context),
    # before the agent's, so that this port has its name when the agent finds its own
    Concern("locks", locks.context),
    Concern("channel", plain.context),
    Concern("console", plain.context),
    Concern("rng", plain.context),
    Concern("panic", plain.context),
    Concern("hostdev", hostdev.context),
)
LAST = (Concern("security", plain.context), Concern("capabilities", capabilities.context))


def _environment() -> Environment:
    """Jinja with all templates in memory: a running Prolog must not read those of a newer version."""
    package = PackageLoader("vhpc_slurm.domain", "templates")
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.loader = DictLoader({name: package.get_source(made, name)[0] for name in package.list_templates()})
    return made


_ENVIRONMENT = _environment()


def prepare() -> None:
    """Compile templates that each guest needs, which takes longer than to fill them.

    ``render`` compiles those that are not, so it may be called without this.
    """
    for concern in (*DOMAIN, *LAST):
        _template(concern)


def render(spec: DomainSpec) -> str:
    """libvirt domain XML of one guest, ending in a newline."""
    return _ENVIRONMENT.get_template("domain.xml.j2").render(
        hypervisor="kvm" if spec.kvm else "qemu",
        domain=_parts(DOMAIN, spec),
        devices=_parts(DEVICES, spec),
        last=_parts(LAST, spec),
    )


def _parts(concerns: tuple[Concern, ...], spec: DomainSpec) -> list[Markup]:
    parts = []
    for concern in concerns:
        context = concern.context(spec)
        if context is not None:
            parts.append(Markup(_template(concern).render(_fields(context)).rstrip("\n")))  # noqa: S704 - escaped by the template
    return parts


def _template(concern: Concern) -> Template:
    return _ENVIRONMENT.get_template(f"{concern.name}.xml.j2")


def _fields(context: Struct) -> dict[str, Any]:
    return {name: getattr(context, name) for name in context.__struct_fields__}
