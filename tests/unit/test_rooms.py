# SPDX-License-Identifier: Apache-2.0
"""Rooms of the package know only rooms below them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "vhpc_slurm"

# From the top.  Rooms of one floor do not know each other.
FLOORS = (
    {"cli"},
    {"hooks"},
    {"controller", "node"},
    {"fabric", "slurm", "placement", "domain"},
    {"config", "catalog", "model", "hardware", "cpulist", "munge"},
    {"errors"},
    {"terminal"},
)
# Modules of the ground floors that stand on one another, lowest last.
GROUND = ("catalog", "munge", "config", "model", "hardware", "cpulist", "errors", "terminal")
# The same inside vhpcd, from the top. Layers of one floor do not know each other.
CONTROLLER_FLOORS = (
    {"server"},
    {"assembly"},
    {"periodic", "client"},
    {"api"},
    {"leases"},
    {"sync", "store"},
    {"wire_types"},
)
LIBVIRT_CALLER = "node/guest/libvirtd.py"
PURE = {"placement", "domain"}
IMPURE = {
    "os",
    "subprocess",
    "socket",
    "time",
    "random",
    "shutil",
    "threading",
    "libvirt",
    "sqlite3",
    "pathlib",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def floor(name: str) -> int:
    (number,) = (number for number, rooms in enumerate(FLOORS) if name in rooms)
    return number


def imports(source: str, package: tuple[str, ...]) -> set[str]:
    """Dotted names that a module of ``package`` imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def imported(path: Path) -> set[str]:
    package = ("vhpc_slurm", *path.relative_to(PACKAGE).parts[:-1])
    return imports(path.read_text(encoding="utf-8"), package)


def rooms_known(names: set[str]) -> set[str]:
    """Rooms among the imported names; the package's own version belongs to none."""
    known = {name.split(".")[1] for name in names if name.startswith("vhpc_slurm.")}
    return known - {"__version__"}


def complaints(name: str, known: set[str]) -> list[str]:
    """What is wrong with a room that knows these rooms."""
    wrong = []
    for other in sorted(known - {name}):
        if floor(other) < floor(name):
            wrong.append(f"{name} knows {other}, which is above it")
        elif floor(other) == floor(name) and not (
            name in GROUND and other in GROUND and GROUND.index(name) < GROUND.index(other)
        ):
            wrong.append(f"{name} knows {other}, which is on its own floor")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path: Path) -> None:
    if path.parent == PACKAGE and path.name == "__init__.py":
        assert not rooms_known(imported(path)), "the package itself imports nothing of its rooms"
    else:
        assert complaints(room(path), rooms_known(imported(path))) == []


def controller_layer(dotted: str) -> str:
    """The layer of vhpcd that a dotted name belongs to; empty where it belongs to none."""
    parts = dotted.split(".")
    return parts[2] if parts[:2] == ["vhpc_slurm", "controller"] and len(parts) > 2 else ""


def controller_complaints(layer: str, names: set[str]) -> list[str]:
    """Imports of a layer that do not go down."""
    floors = {name: number for number, layers in enumerate(CONTROLLER_FLOORS) for name in layers}
    known = {controller_layer(name) for name in names} - {"", layer}
    return sorted(f"{layer} knows {other}" for other in known if floors[other] <= floors[layer])


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path) == "controller" and path.parent.name != "vhpc_slurm"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_layers_of_vhpcd_know_only_layers_below(path: Path) -> None:
    parts = path.relative_to(PACKAGE / "controller").parts
    if parts != ("__init__.py",):
        assert controller_complaints(parts[0].removesuffix(".py"), imported(path)) == []


def test_the_rule_for_layers_of_vhpcd_catches_what_it_should() -> None:
    up = {"vhpc_slurm.controller.leases.layer.build", "vhpc_slurm.controller.api.protocol"}
    assert controller_complaints("sync", up) == ["sync knows api", "sync knows leases"]
    assert controller_complaints("sync", {"vhpc_slurm.controller.store.database"}) == ["sync knows store"]
    assert controller_complaints("api", {"vhpc_slurm.controller.leases.rules", "vhpc_slurm.errors"}) == []


def foreign_attributes(source: str) -> set[str]:
    """Private attributes that code takes of other objects than its own."""
    return {
        f"{ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path) in ("controller", "fabric")],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_object_reads_the_private_state_of_another(path: Path) -> None:
    assert foreign_attributes(path.read_text(encoding="utf-8")) == set()


def test_private_state_of_another_is_seen() -> None:
    assert foreign_attributes("self._a = other._b\nself.c._d()\nx.__dict__") == {"other._b", "self.c._d"}


def test_every_module_has_a_floor() -> None:
    rooms = {room(path) for path in modules()} - {"__init__", "__main__"}
    assert rooms - set().union(*FLOORS) == set()


@pytest.mark.parametrize(
    ("name", "known", "count"),
    [
        ("node", {"hooks"}, 1),
        ("node", {"controller"}, 1),
        ("domain", {"placement", "model", "errors"}, 1),
        ("model", {"config"}, 1),
        ("errors", {"model"}, 1),
        ("config", {"model", "errors"}, 0),
        ("hooks", {"controller", "node", "placement", "model"}, 0),
    ],
)
def test_the_rule_itself_catches_what_it_should(name: str, known: set[str], count: int) -> None:
    assert len(complaints(name, known)) == count


def test_imports_hidden_in_functions_and_relative_ones_are_seen() -> None:
    lines = (
        "def f():",
        "    import vhpc_slurm.hooks.prolog",
        "from ..controller.client import ask",
        "from . import guest",
    )
    source = "\n".join(lines)
    assert rooms_known(imports(source, ("vhpc_slurm", "node"))) == {"hooks", "controller", "node"}


def test_only_one_module_calls_libvirt() -> None:
    callers = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if any(name.split(".")[0] == "libvirt" for name in imported(path))
    }
    assert callers <= {LIBVIRT_CALLER}


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path) in PURE],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_planning_and_rendering_touch_nothing_outside(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} & IMPURE == set()
