# SPDX-License-Identifier: Apache-2.0
"""The app for Open OnDemand: its files, rendered by Ruby, and its scripts with a stand-in for the guest."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from vhpc_slurm.cli.main import main

ROOT = Path(__file__).parents[3]
APP, DATA = ROOT / "contrib/ondemand", ROOT / "tests/data/ondemand"
RUBY = os.environ.get("VHPC_TEST_RUBY") or shutil.which("ruby")
SCRIPTS = sorted(path.name for path in (APP / "template").iterdir())
pytestmark = pytest.mark.skipif(RUBY is None, reason="needs ruby: apt install ruby, or set VHPC_TEST_RUBY")

CHOSEN = {
    "kind": "jupyter",
    "image": "debian-jupyter:latest",
    "cores": "4",
    "memory": "8",
    "gpus": "0",
    "network": "",
    "portal": "https://ondemand.example.org",
    "portal_addresses": "192.0.2.5 192.0.2.6",
    "site_options": "[]",
}
HOSTILE = "x'; touch owned; '\n- $(touch owned) \"#{1+1}\" <%= 1 %>"


def render(how: str, name: str, values: dict[str, Any], **variables: str) -> str:
    assert RUBY is not None
    command = [RUBY, str(DATA / "render.rb"), how, str(APP / name)]
    environment = os.environ | variables
    done = subprocess.run(
        command,
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


# --- form and submission --------------------------------------------------------------


def form(tmp_path: Path, names: str, **site: Any) -> dict[str, Any]:
    path = tmp_path / "settings.yml"
    settings = json.loads(render("plain", "settings.yml.example", {})) | site
    path.write_text(json.dumps({key: one for key, one in settings.items() if one is not None}))  # also YAML
    program(tmp_path / "bin", "vhpc", f"#!/bin/sh\n{names}\n")
    search = f"{tmp_path}/bin:{os.environ['PATH']}"
    text = render("form", "form.yml.erb", {}, VHPC_ONDEMAND_SETTINGS=str(path), PATH=search)
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_form_offers_the_images_of_the_user(tmp_path: Path) -> None:
    names = '[ "$*" = "image names" ] && printf "own/mine:1\\ndebian-jupyter:latest\\nbase:2\\n"'
    found = form(tmp_path, names, patterns=["own/*", "debian-*"])
    images = found["attributes"]["image"]["options"]
    assert images == [[name, name] for name in ("own/mine:1", "debian-jupyter:latest")]
    assert found["cluster"] == "mycluster"
    assert "gpus" not in found["form"]
    assert set(found["form"]) <= {*found["attributes"], "bc_account", "bc_queue"}
    assert found["attributes"]["portal_addresses"] == "192.0.2.5", "fixed, since it is no table"


@pytest.mark.parametrize("names", ["exit 2", "true"])
def test_without_an_answer_the_form_has_the_site_s_list(tmp_path: Path, names: str) -> None:
    found = form(tmp_path, names, images=["a:1"], max_gpus=2, networks=["none", "nat"])
    assert found["attributes"]["image"]["options"] == [["a:1", "a:1"]]
    assert found["attributes"]["gpus"]["max"] == 2
    assert "gpus" in found["form"]
    assert [value for _, value in found["attributes"]["network"]["options"]] == ["", "none", "nat"]


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"portal_addresses": []}, "has no portal_addresses"),
        ({"portal_addresses": None}, "has no portal_addresses"),
        ({"portal": "*"}, "portal is not of the form"),
        ({"portal": "https://a.example/x"}, "portal is not of the form"),
    ],
)
def test_settings_that_open_the_port_are_refused(tmp_path: Path, site: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        form(tmp_path, "true", **site)


def native(**chosen: str) -> list[str]:
    found = json.loads(render("submit", "submit.yml.erb", CHOSEN | chosen))
    assert found["batch_connect"] == {"template": "basic", "conn_params": ["kind", "portal"]}
    options: list[str] = found["script"]["native"]
    return options


def test_a_submission_asks_for_one_guest() -> None:
    assert native() == [
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=4",
        "--mem=8G",
        "--vhpc-image=debian-jupyter:latest",
        "--vhpc-batch=host",
    ]
    more = native(network="nat", gpus="2", site_options='["--constraint=kvm"]')
    assert more[6:] == ["--vhpc-network=nat", "--gpus-per-node=2", "--constraint=kvm"]


def test_texts_of_the_form_stay_one_argument_each() -> None:
    options = native(image=HOSTILE, network=HOSTILE)
    assert options[4] == f"--vhpc-image={HOSTILE}"
    assert options[6] == f"--vhpc-network={HOSTILE}"
    assert len(options) == 7


def test_the_policy_can_be_asked_about_a_submission(capsys: pytest.CaptureFixture[str]) -> None:
    values = dict(word.removeprefix("--vhpc-").split("=") for word in native() if word.startswith("--vhpc-"))
    assert main(["policy", "check", f"--batch={values['batch']}", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert ["batch", "host", "the job"] in [list(one.values()) for one in row["gets"]]


# --- connection -----------------------------------------------------------------------


def view(kind: str) -> str:
    values = {"host": "n1", "port": 4242, "password": "aB3", "kind": kind, "portal": CHOSEN["portal"]}
    return render("view", "view.html.erb", values)


def test_the_view_leads_through_the_portal() -> None:
    jupyter = view("jupyter")
    assert 'action="/node/n1/4242/lab"' in jupyter
    assert 'name="token" value="aB3"' in jupyter
    (link,) = re.findall(r'href="([^"]*)"', view("desktop"))
    path, _, fragment = link.replace("&amp;", "&").partition("#")
    assert path == "/rnode/n1/4242/vnc.html"
    settings = dict(urllib.parse.parse_qsl(fragment))
    assert (settings["host"], settings["port"], settings["encrypt"]) == ("ondemand.example.org", "443", "1")
    assert settings["path"] == "rnode/n1/4242/websockify"
    assert settings["password"] == "aB3"


def staged(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """A file of the app's template in the folder of a session."""
    source, path = APP / "template" / name, folder / name.removesuffix(".erb")
    shutil.copy(source, path)
    if path.name != name:
        path.write_text(render("template", f"template/{name}", values))
    return path


# --- scripts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("hostile", [False, True])
def test_scripts_are_valid(tmp_path: Path, name: str, hostile: bool) -> None:
    wrong = dict.fromkeys(("kind", "portal", "portal_addresses"), HOSTILE)
    path = staged(tmp_path, name, CHOSEN | (wrong if hostile else {}))
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    if shutil.which("shellcheck") and not hostile:
        said = subprocess.run(
            ["shellcheck", "-S", "info", "-s", "bash", "-e", "SC2034", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 0, said.stdout


def test_texts_of_the_form_cannot_run_commands(tmp_path: Path) -> None:
    texts = dict.fromkeys(("kind", "portal", "portal_addresses"), HOSTILE)
    values = render("template", "template/values.sh.erb", CHOSEN | texts)
    show = values + 'printf \'%s|\' "$kind" "$portal" "${admitted[@]}"'
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, cwd=tmp_path, check=True)
    words = [word for text in HOSTILE.split() for word in ("--from", text)]
    assert done.stdout.split("|")[:-1] == [HOSTILE, HOSTILE, *words]
    assert list(tmp_path.iterdir()) == []


def test_only_the_main_script_has_to_be_executable() -> None:
    assert os.access(APP / "template/script.sh", os.X_OK)


FORWARD = """#!/bin/bash
echo "$@" >forward.args
echo "vhpc: 0.0.0.0:41999 leads to port 8888 of the guest of n1, until Ctrl-C" >&2
echo $$ >forward.pid
exec sleep 300
"""
JUPYTER = """#!/usr/bin/env python3
import json, os, socket, sys
with socket.create_server(("127.0.0.1", 8888)) as server:
    open(os.environ["SEEN"], "w").write(json.dumps([sys.argv[1:], os.environ["JUPYTER_TOKEN"]]))
    server.accept()
    while not os.path.exists(os.environ["SEEN"] + ".end"):
        import time
        time.sleep(0.1)
"""


def session(folder: Path, kind: str, **programs: str) -> subprocess.Popen[str]:
    """Start a session in a network of its own, whose guest is this host."""
    for name in SCRIPTS:
        staged(folder, name, CHOSEN | {"kind": kind})
    program(folder / "bin", "srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    for name, text in programs.items():
        program(folder / "bin", name, text)
    variables = {
        "PATH": f"{folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "SEEN": str(folder / "seen"),
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURMD_NODENAME": "n1",
        "VHPC_NOVNC": str(folder / "novnc"),
    }
    start = f"ip link set lo up && exec {DATA / 'batch.sh'}"
    return subprocess.Popen(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            start,
        ],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def can_unshare() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--net", "ip", "link", "set", "lo", "up"]
    return (
        bool(shutil.which("ip")) and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


needs_network = pytest.mark.skipif(
    not can_unshare(), reason="needs a network namespace: apt install iproute2, permit user namespaces"
)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def connection(folder: Path, process: subprocess.Popen[str]) -> dict[str, str]:
    """The portal's data about a session; fails if the session ends."""
    path = folder / "connection.yml"
    for _ in range(600):
        if process.poll() is not None or path.exists():
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.poll() is None, process.communicate()[0]
    return dict(line.split(": ") for line in path.read_text().splitlines())


@needs_network
def test_a_session_of_jupyter(tmp_path: Path) -> None:
    process = session(tmp_path, "jupyter", vhpc=FORWARD, jupyter=JUPYTER)
    try:
        found = connection(tmp_path, process)
        assert (found["port"], found["kind"], len(found["password"])) == ("41999", "jupyter", 32)
        words, token = json.loads((tmp_path / "seen").read_text())
        assert token == found["password"]
        assert "--ServerApp.ip=127.0.0.1" in words
        assert "--ServerApp.base_url=/node/n1/41999/" in words
        assert not any(token in word for word in words), "other users see command lines"
        asked = (tmp_path / "forward.args").read_text()
        assert asked == "forward 7 0:8888 --listen 0.0.0.0 --from 192.0.2.5 --from 192.0.2.6\n"
        assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
        (tmp_path / "seen.end").touch()
        assert process.wait(30) == 0
        assert not (tmp_path / "secret").exists()
    finally:
        end(process)


@needs_network
def test_a_session_of_a_desktop(tmp_path: Path) -> None:
    (tmp_path / "novnc").mkdir()
    (tmp_path / "novnc/vnc.html").touch()
    listen = """#!/usr/bin/env python3
import signal, socket
kept = socket.create_server(('127.0.0.1', {}))
signal.pause()
"""
    process = session(
        tmp_path,
        "desktop",
        vhpc=FORWARD,
        Xvnc='#!/bin/sh\necho "$@" >Xvnc.args\nexec "${0%/*}/listen"\n',
        listen=listen.format(5901),
        websockify=listen.format(6080).replace(
            "import", "import sys; open('ws.args', 'w').write(str(sys.argv[1:]))\nimport", 1
        ),
        vncpasswd='#!/bin/sh\n[ "$*" = -f ] && tr a-zA-Z n-za-mN-ZA-M\n',
        **{"dbus-run-session": '#!/bin/sh\nshift\nexec "$@"\n'},
        startxfce4='#!/bin/sh\necho $DISPLAY >~/display\nuntil [ -e "$SEEN.end" ]; do sleep 0.1; done\n',
    )
    try:
        found = connection(tmp_path, process)
        assert (found["kind"], len(found["password"])) == ("desktop", 8)
        assert "forward 7 0:6080 " in (tmp_path / "forward.args").read_text()
        words = (tmp_path / "Xvnc.args").read_text().split()
        assert {"-localhost", "VncAuth"} <= set(words)
        secret = Path(words[words.index("-rfbauth") + 1])
        assert secret.read_text().strip() == codecs.encode(found["password"], "rot13")
        assert secret.stat().st_mode & 0o077 == 0
        assert "'127.0.0.1:6080', '127.0.0.1:5901'" in (tmp_path / "ws.args").read_text()
        (tmp_path / "seen.end").touch()
        assert process.wait(30) == 0
        assert (tmp_path / "display").read_text() == ":1\n"
        assert not secret.exists()
    finally:
        end(process)


@needs_network
@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (FORWARD, "The image has no jupyter"),
        ("#!/bin/sh\necho 'vhpc: job 7 has no guests' >&2; exit 1\n", "vhpc: job 7 has no guests"),
    ],
)
def test_a_session_that_cannot_start_says_why(tmp_path: Path, forward: str, says: str) -> None:
    process = session(tmp_path, "jupyter", vhpc=forward)
    try:
        out = process.communicate(timeout=60)[0]
        assert process.returncode == 1
        assert says in out
        assert not (tmp_path / "secret").exists()
    finally:
        end(process)
