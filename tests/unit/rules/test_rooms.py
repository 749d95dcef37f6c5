# SPDX-License-Identifier: Apache-2.0
"""Rooms of the package know only rooms below them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "python" / "vhpc_slurm"

# From the top.  Rooms of one floor do not know each other.
FLOORS = (
    {"cli"},
    {"hooks", "bench"},
    {"reconcile"},
    {"controller", "node"},
    {"fabric", "slurm", "placement", "domain", "importing", "policy"},
    {"bootfiles", "config", "catalog", "model", "device", "hardware", "cpulist", "munge", "pointers"},
    {"errors"},
    {"terminal", "loglines", "files", "chunks", "rootport", "record", "progress", "options", "architecture"}
    | {"undecodable", "beside"},
)
# Modules of the ground floors that stand on one another, lowest last.
GROUND = (
    *("catalog", "munge", "config", "model", "device", "hardware", "cpulist", "pointers", "errors"),
    *("loglines", "terminal", "files", "chunks", "rootport", "record", "progress", "options", "architecture"),
    *("undecodable", "beside"),
)
# The same inside a room, from the top. Layers of one floor do not know each other.
LAYERS = {
    "controller": (
        {"server"},
        {"metrics"},
        {"assembly", "tenure"},
        {"periodic", "timed", "client"},
        {"passes"},
        {"checkpoint_client", "cluster_client"},
        {"exchange"},
        {"asking", "epochs"},
        {"api"},
        {"leases"},
        {"sync", "store"},
        {"wire_types"},
    ),
    "node": (
        {"boot", "teardown"},
        {"checkpoint", "plan", "resource"},
        {"guest", "devices", "network"},
        {"store"},
        {"host", "finding", "checked"},
    ),
}
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
    """Faults of a room that knows these rooms."""
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


def layer_complaints(name: str, layer: str, names: set[str]) -> list[str]:
    """Imports of a room's layer from other layers of the room that do not go down."""
    floors = {one: number for number, layers in enumerate(LAYERS[name]) for one in layers}
    parts = [dotted.split(".") for dotted in names]
    known = {part[2] for part in parts if part[:2] == ["vhpc_slurm", name] and len(part) > 2} - {layer}
    return sorted(f"{layer} knows {other}" for other in known if floors[other] <= floors[layer])


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room(path) in LAYERS and path != PACKAGE / room(path) / "__init__.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_layers_of_a_room_know_only_layers_below(path: Path) -> None:
    layer = path.relative_to(PACKAGE / room(path)).parts[0].removesuffix(".py")
    assert layer_complaints(room(path), layer, imported(path)) == []


@pytest.mark.parametrize("name", LAYERS)
def test_a_room_with_layers_imports_nothing_of_its_own(name: str) -> None:
    assert name not in rooms_known(imported(PACKAGE / name / "__init__.py"))


def test_the_rule_for_layers_finds_violations() -> None:
    up = {"vhpc_slurm.controller.leases.layer.build", "vhpc_slurm.controller.api.protocol"}
    assert layer_complaints("controller", "sync", up) == ["sync knows api", "sync knows leases"]
    beside = {"vhpc_slurm.controller.store.database"}
    assert layer_complaints("controller", "sync", beside) == ["sync knows store"]
    down = {"vhpc_slurm.controller.leases.rules", "vhpc_slurm.node.boot.sequence", "vhpc_slurm.errors"}
    assert layer_complaints("controller", "api", down) == []
    assert layer_complaints("node", "guest", {"vhpc_slurm.node.devices.vf"}) == ["guest knows devices"]


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
        ("node", {"reconcile"}, 1),
        ("reconcile", {"hooks"}, 1),
        ("reconcile", {"cli"}, 1),
        ("reconcile", {"controller", "node", "slurm"}, 0),
        ("node", {"controller"}, 1),
        ("domain", {"placement", "model", "errors"}, 1),
        ("model", {"config"}, 1),
        ("errors", {"model"}, 1),
        ("config", {"model", "errors"}, 0),
        ("hooks", {"controller", "node", "placement", "model"}, 0),
    ],
)
def test_the_rule_finds_violations(name: str, known: set[str], count: int) -> None:
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


def circles(known: dict[str, set[str]]) -> list[list[str]]:
    """Circles among modules, each once and from its first module in the alphabet."""
    found = []

    def follow(path: list[str]) -> None:
        for name in sorted(known.get(path[-1], ())):
            if name == path[0]:
                found.append(path)
            elif name > path[0] and name not in path:
                follow([*path, name])

    for name in sorted(known):
        follow([name])
    return found


def members_known(members: dict[str, Path]) -> dict[str, set[str]]:
    """For each of these modules the others that it imports, or imports names of."""
    known = {}
    for module, path in members.items():
        names = imported(path)
        known[module] = {
            other for other in members if any(name == other or name.startswith(f"{other}.") for name in names)
        }
    return known


@pytest.mark.parametrize("name", sorted({room(path) for path in modules() if path.parent != PACKAGE}))
def test_modules_of_a_room_import_in_one_direction(name: str) -> None:
    members = {
        ".".join(("vhpc_slurm", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in (PACKAGE / name).rglob("*.py")
        if path.name != "__init__.py"
    }
    known = members_known(members)
    assert any(known.values()), "no module imports another: the check sees nothing"
    assert circles(known) == []


def test_the_check_finds_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c", "a"}, "c": {"b"}}) == [["a", "b"], ["b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c"]]


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


def test_test_modules_do_not_import_each_other() -> None:
    tests = Path(__file__).parents[2]
    known = {
        str(path.relative_to(tests)): {name.split(".")[0] for name in imports(path.read_text(), ())}
        for path in tests.rglob("test_*.py")
    }
    assert len(known) > 100
    assert {path: names for path, names in known.items() if any(n.startswith("test_") for n in names)} == {}
