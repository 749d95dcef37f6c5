# SPDX-License-Identifier: Apache-2.0
"""A hook that starts while dpkg replaces the package: a copy of the package, replaced in the middle."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vhpc_slurm.hooks import start

SOURCES = Path(__file__).parents[2] / "python"
# Modules of commands and of vhpcd: no hook calls the functions that import them.
NOT_FOR_HOOKS = {f"vhpc_slurm.slurm.{name}" for name in ("choice", "noderuns", "sacct", "userjobs")}
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


class Package:
    """A small package with this module in it, as two modules of one version."""

    def __init__(self, folder: Path) -> None:
        self.top, self.mark = folder / "lib", folder / "mark"
        self.begun, self.hold = folder / "begun", folder / "hold"
        self.hooks = self.top / "vhpc_slurm/hooks"
        self.hooks.mkdir(parents=True)
        text = Path(start.__file__).read_text()
        text = text.replace('Path("/run/vhpc-upgrading")', f'Path("{self.mark}")')
        text = text.replace("LATE[module]", "()").replace("WAIT_S = 120.0", "WAIT_S = 20.0")
        (self.hooks / "start.py").write_text(text)
        (self.hooks / "__init__.py").touch()
        (self.hooks / "fake.py").write_text(HOOK.format(begun=str(self.begun), hold=str(self.hold)))
        self.install(1)

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
        end = time.monotonic() + 20
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


def test_a_hook_waits_while_its_package_is_replaced(package: Package) -> None:
    package.mark.touch()
    package.install(2, "a")
    process = package.run()
    time.sleep(0.5)
    assert not package.begun.exists()
    package.install(2, "b")
    package.mark.unlink()
    assert said(process) == "word 2 2\n"


def test_a_package_replaced_during_the_imports_starts_it_again(package: Package) -> None:
    package.hold.touch()
    process = package.run()
    package.wait_begun(1)  # it has the first module of version 1
    package.install(2)
    package.hold.unlink()
    assert said(process) == "word 2 2\n"


def test_a_module_that_is_gone_meanwhile_is_no_error(package: Package) -> None:
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


def test_a_mark_of_a_killed_dpkg_stops_no_hook(package: Package) -> None:
    package.mark.touch()
    os.utime(package.mark, (time.time() - 2 * start.STALE_S,) * 2)
    assert said(package.run()) == "word 1 1\n"


def test_a_broken_package_is_an_error_at_once(package: Package) -> None:
    (package.hooks / "version_b.py").unlink()
    began = time.monotonic()
    process = package.run()
    process.communicate(timeout=40)
    assert process.returncode == 1
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("hook", sorted(start.LATE))
def test_a_running_hook_has_imported_all_that_it_may_need(hook: str) -> None:
    script = (
        "import json, sys\nfrom vhpc_slurm.hooks import start\n"
        f"start.load({hook!r})\nprint(json.dumps([n for n in sys.modules if n.startswith('vhpc_slurm')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(SOURCES)}, capture_output=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert hook in loaded
    late = set()
    for name in loaded:
        path = SOURCES / name.replace(".", "/")
        late |= inside_functions(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert late - loaded - NOT_FOR_HOOKS == set()


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
        "names = [one.name for one in (*render.DOMAIN, *render.DEVICES, *render.SECURITY)]\n"
        "for name in (*names, 'domain'): render._ENVIRONMENT.get_template(f'{name}.xml.j2')\n"
        "print(len(names))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert int(done.stdout) > 10
