# SPDX-License-Identifier: Apache-2.0
"""A hook that starts while dpkg replaces the package: a copy of the package, replaced in the middle."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pace import limit
from vhpc_slurm.hooks import start

SOURCES = Path(__file__).parents[3] / "python"
# Modules of commands and of vhpcd: no hook calls the functions that import them.
NOT_FOR_HOOKS = {f"vhpc_slurm.slurm.{name}" for name in ("choice", "noderuns", "sacct", "userjobs")}
# Imports of hooks: of Prolog until it has asked vhpcd, of slurmctld's hooks in all.
LIGHT = {"msgspec", "typing_extensions"}
FEW_PARTS = {
    *("chunks", "config", "controller", "cpulist", "device", "errors", "files", "hardware", "hooks"),
    *("loglines", "model", "munge", "node", "options", "record", "rootport", "terminal", "undecodable"),
}
MANY = {*LIGHT, "jinja2", "libvirt", "libvirtmod", "markupsafe"}
COSTLY = {"asyncio", "email", "http", "ssl", "multiprocessing", "sqlite3", "unittest", "pydoc"}
HOOK = """
import os, sys, time
from vhpc_slurm.hooks import version_a
open({begun!r}, "a").write("x")
while os.path.exists({hold!r}): time.sleep(0.01)
from vhpc_slurm.hooks import version_b
def entry(word):
    print(word, version_a.V, version_b.V)
    return 3
"""
TWO_PARTS = """
import os, time
from vhpc_slurm.hooks import start, version_a
def entry(word):
    open({begun!r}, "a").write("x")
    while os.path.exists({hold!r}): time.sleep(0.01)
    start.load_rest("vhpc_slurm.hooks.fake")
    from vhpc_slurm.hooks import version_b
    print(word, version_a.V, version_b.V)
    return 3
"""


class Package:
    """A small package with this module in it, as two modules of one version."""

    def __init__(self, folder: Path) -> None:
        self.top, self.mark = folder / "lib", folder / "mark"
        self.begun, self.hold = folder / "begun", folder / "hold"
        self.hooks = self.top / "vhpc_slurm/hooks"
        self.hooks.mkdir(parents=True)
        text = Path(start.__file__).read_text()
        text = text.replace('Path("/run/vhpc-upgrading")', f'Path("{self.mark}")')
        text = text.replace("REST[module]", "['vhpc_slurm.hooks.version_b']")
        text = text.replace("LATE[module]", "()").replace("WAIT_S = 120.0", "WAIT_S = 20.0")
        (self.hooks / "start.py").write_text(text)
        (self.hooks / "__init__.py").touch()
        self.write(HOOK)
        self.install(1)

    def write(self, hook: str) -> None:
        (self.hooks / "fake.py").write_text(hook.format(begun=str(self.begun), hold=str(self.hold)))

    def install(self, version: int, names: str = "ab") -> None:
        """As dpkg does: new files by rename."""
        for path in (self.top / "vhpc_slurm/__init__.py", *(self.hooks / f"version_{x}.py" for x in names)):
            new = path.with_suffix(".dpkg-new")
            new.write_text(f"V = {version}\n")
            new.rename(path)

    def run(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-B", "-m", "vhpc_slurm.hooks.start", "vhpc_slurm.hooks.fake", "word"]
        environment = {"PYTHONPATH": str(self.top), "PATH": os.environ["PATH"]}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=self.top)

    def wait_begun(self, times: int) -> None:
        end = time.monotonic() + limit(60)
        while not self.begun.exists() or len(self.begun.read_text()) < times:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def said(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 3
    return out


def test_a_hook_runs_with_its_arguments_and_exit_status(package: Package) -> None:
    assert said(package.run()) == "word 1 1\n"


@pytest.mark.promise("hooks.replaced")
def test_a_hook_waits_while_its_package_is_replaced(package: Package) -> None:
    package.mark.touch()
    package.install(2, "a")
    process = package.run()
    time.sleep(0.5)
    assert not package.begun.exists()
    package.install(2, "b")
    package.mark.unlink()
    assert said(process) == "word 2 2\n"


@pytest.mark.promise("hooks.replaced")
def test_a_package_replaced_during_the_imports_starts_it_again(package: Package) -> None:
    package.hold.touch()
    process = package.run()
    package.wait_begun(1)  # it has the first module of version 1
    package.install(2)
    package.hold.unlink()
    assert said(process) == "word 2 2\n"


def test_a_module_removed_meanwhile_is_no_error(package: Package) -> None:
    package.hold.touch()
    process = package.run()
    package.wait_begun(1)
    package.mark.touch()
    (package.hooks / "version_b.py").unlink()
    package.hold.unlink()
    time.sleep(0.5)
    assert process.poll() is None
    package.install(2)
    package.mark.unlink()
    assert said(process) == "word 2 2\n"


@pytest.mark.promise("hooks.replaced")
@pytest.mark.parametrize("mark", [False, True])
def test_a_package_replaced_before_the_rest_restarts_the_hook(package: Package, mark: bool) -> None:
    package.write(TWO_PARTS)
    package.hold.touch()
    process = package.run()
    package.wait_begun(1)  # it has asked vhpcd
    if mark:
        package.mark.touch()
        (package.hooks / "version_b.py").unlink()
        package.hold.unlink()
        time.sleep(0.3)
        assert process.poll() is None
    package.install(2)
    package.hold.unlink(missing_ok=True)
    package.mark.unlink(missing_ok=True)
    assert said(process) == "word 2 2\n"


def test_a_mark_of_a_killed_dpkg_stops_no_hook(package: Package) -> None:
    package.mark.touch()
    os.utime(package.mark, (time.time() - 2 * start.STALE_S,) * 2)
    assert said(package.run()) == "word 1 1\n"


def test_a_broken_package_is_an_error_at_once(package: Package) -> None:
    (package.hooks / "version_b.py").unlink()
    began = time.monotonic()
    process = package.run()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - began < 20, "without a mark it waits for no package, as above"


@pytest.mark.promise("hooks.replaced")
@pytest.mark.parametrize("hook", sorted(start.LATE))
def test_a_running_hook_has_imported_all_that_it_may_need(hook: str) -> None:
    loaded = {name for name in modules(hook, rest=True) if name.startswith("vhpc_slurm")}
    assert hook in loaded
    late = set()
    for name in loaded:
        path = SOURCES / name.replace(".", "/")
        late |= inside_functions(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert late - loaded - NOT_FOR_HOOKS == set()


def modules(hook: str, *, rest: bool) -> set[str]:
    """Modules that a hook has imported when it starts, or when it has all."""
    whole = rest and hook in start.REST
    script = (
        "from vhpc_slurm.hooks import start\n"
        f"start.load({hook!r})\n" + (f"start.load_rest({hook!r})\n" if whole else "") + "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n{script}"],
        capture_output=True,
        check=True,
        text=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("hook", sorted(start.LATE))
def test_hooks_import_few_packages(hook: str) -> None:
    found = {name.partition(".")[0] for name in modules(hook, rest=True)}
    foreign = found - sys.stdlib_module_names - {"vhpc_slurm", "__main__", "sitecustomize", "_distutils_hack"}
    allowed = LIGHT if hook.endswith((".slurmctld", ".hookd")) else MANY
    assert {name for name in foreign if not name.startswith(("_", "distutils"))} <= allowed
    assert found & COSTLY == set()


def test_prolog_asks_vhpcd_before_importing_the_boot_code() -> None:
    found = modules("vhpc_slurm.hooks.prolog", rest=False)
    foreign = {name.partition(".")[0] for name in found} - sys.stdlib_module_names
    assert foreign & (MANY | {"rich", "typer", "pydantic"}) <= LIGHT
    ours = {name for name in found if name.startswith("vhpc_slurm.")}
    assert {name.split(".")[1] for name in ours} <= FEW_PARTS
    assert {name for name in ours if name.startswith("vhpc_slurm.node.")} == {
        *("vhpc_slurm.node.host", "vhpc_slurm.node.host.fuse", "vhpc_slurm.node.host.process"),
        *("vhpc_slurm.node.store", "vhpc_slurm.node.store.joblock", "vhpc_slurm.node.store.layout"),
    }
    assert "dataclasses" not in found
    assert "xml" not in found
    assert "concurrent" not in found


def inside_functions(path: Path) -> set[str]:
    """Modules of the package that functions of a module import."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vhpc_slurm"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    is_module = (SOURCES / (whole.replace(".", "/") + ".py")).exists()
                    found.add(whole if is_module else node.module or "")
    return found


def test_templates_are_in_memory_before_a_guest_is_planned(tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    templates = tmp_path / "lib/vhpc_slurm/domain/templates"
    script = (
        f"import shutil\nfrom vhpc_slurm.domain import render\nshutil.rmtree({str(templates)!r})\n"
        "names = [one.name for one in (*render.DOMAIN, *render.DEVICES, *render.LAST)]\n"
        "for name in (*names, 'domain'): render._ENVIRONMENT.get_template(f'{name}.xml.j2')\n"
        "print(len(names))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert int(done.stdout) > 10
