# SPDX-License-Identifier: Apache-2.0
"""vhpc ssh and vhpc ssh-config: srun, ssh and sshd are scripts, the agent and the keys are real."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import gone

from pace import until
from vhpc_slurm.cli.jobs import sshkeys
from vhpc_slurm.errors import UserError

if TYPE_CHECKING:
    from guest_rig import Guest
    from step_rig import StepSite

pytest_plugins = ["guest_rig", "step_rig"]
MIB = 1 << 20
WAIT_S = 60
SSHD = """#!/bin/bash
shift $(($# - 1))
folder=${{1%/*}}
echo "$folder" > {seen}/folder
cp "$folder"/* {seen}
umask > {seen}/umask
stat -c %a "$folder" "$folder/host_key" > {seen}/modes
trap -p > {seen}/ignored
printf 'SSH-2.0-test\\r\\n'
exec cat
"""


@pytest.fixture
def seen(site: StepSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what sshd of the guest has seen; the site has this sshd, and a home of its own."""
    folder = tmp_path / "seen"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    site.script("bin/sshd", SSHD.format(seen=folder))
    site.before(f"export PATH={tmp_path}/bin:$PATH")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def kill_with_children(pid: int) -> None:
    """As the end of a job does."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_with_children(int(child))


def keys_of(site: StepSite) -> Path:
    return site.folder / "home/.config/vhpc/ssh"


@pytest.mark.promise("tools.ssh")
def test_bytes_and_keys_reach_sshd_in_the_guest(site: StepSite, seen: Path) -> None:
    authorized = site.folder / "home/.ssh/authorized_keys"
    authorized.parent.mkdir(parents=True)
    authorized.write_text("# laptop\n\n.\nrestrict ssh-ed25519 AAAA laptop\n")
    data = os.urandom(5 * MIB)
    code, out, said = site.run("ssh", "--stdio", "7", "--node", "n2", stdin=data)
    assert (code, said) == (0, "")
    assert out == b"SSH-2.0-test\r\n" + data
    keys = keys_of(site)
    assert (seen / "host_key").read_text() == (keys / "host_key").read_text()
    assert (seen / "keys").read_text().splitlines() == [
        (keys / "id_ed25519.pub").read_text().strip(),
        "restrict ssh-ed25519 AAAA laptop",
    ]
    assert (seen / "modes").read_text().split() == ["700", "600"]
    assert int((seen / "umask").read_text(), 8) == (os.umask(current := os.umask(0)), current)[1]
    assert (seen / "ignored").read_text() == ""
    assert not Path((seen / "folder").read_text().strip()).exists()
    asked = site.asked()
    assert asked.startswith("--jobid 7 --job-name=vhpc-ssh --quiet --overlap --mem=0 ")
    assert "--nodes=1 --ntasks=1 --nodelist=n2 /bin/sh -c " in asked
    assert "PRIVATE KEY" not in asked


def test_a_socket_for_both_directions_as_sshd_gives_it(site: StepSite, seen: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = site.start("ssh", "--stdio", "7", stdin=theirs.fileno(), stdout=theirs.fileno())
        theirs.close()
        data = os.urandom(MIB)

        def send() -> None:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        out = b"".join(iter(lambda: ours.recv(65536), b""))
        sender.join()
        assert out == b"SSH-2.0-test\r\n" + data
        assert process.wait(WAIT_S) == 0
        process.communicate()
    assert seen


def test_ssh_works_over_the_channel_of_a_guest(site: StepSite, seen: Path, guest: Guest) -> None:
    site.before(
        f'export PATH={site.folder}/bin:$PATH VHPC_RUN_SOCKET={guest.socket}; RUN="{guest.bin}/vhpc-run --"'
    )
    data = os.urandom(5 * MIB)
    code, out, said = site.run("ssh", "--stdio", "7", stdin=data)
    assert (code, out == b"SSH-2.0-test\r\n" + data, said) == (0, True, "")
    assert seen


@pytest.mark.promise("tools.ssh")
def test_sessions_have_the_variables_of_the_job(site: StepSite, seen: Path) -> None:
    site.before(
        f"export PATH={site.folder}/bin:$PATH SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_MPI_TYPE=none LANG=C\n"
        "export VHPC_X='a b' QUOTED='a\"b' BACKSLASH='a\\b' SLURM_JOB_CPUS_PER_NODE='4(x2)'\n"
        "export SLURM_JOB_NODELIST=n1 "
        "LINES2=$'a\\nb' TERM=dumb SSH_AUTH_SOCK=/x"
    )
    assert site.run("ssh", "--stdio", "7")[0] == 0
    (line,) = [one for one in (seen / "config").read_text().splitlines() if one.startswith("SetEnv ")]
    for expected in (
        '"SLURM_JOB_ID=7"',
        '"VHPC_X=a b"',
        '"SLURM_TASKS_PER_NODE=4(x2)"',
        '"SLURM_JOB_NODELIST=n[1-2]"',
        '"SLURM_NNODES=2"',
        f'"PATH={site.folder}/bin:',
    ):
        assert f" {expected}" in line
    for other in (
        "NTASKS",
        "MPI_TYPE",
        "QUOTED",
        "BACKSLASH",
        "LANG",
        "LINES2",
        "TERM=",
        "SSH_",
        "=n1",
        "HOME=",
    ):
        assert other not in line


@pytest.mark.promise("tools.ssh")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_sshd_and_keys_in_the_guest_end_with_the_command(
    site: StepSite, seen: Path, number: signal.Signals
) -> None:
    process = site.start("ssh", "--stdio", "7", stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(14) == b"SSH-2.0-test\r\n"
    pid = site.step()
    process.send_signal(number)
    process.wait(WAIT_S)
    assert gone(pid)
    folder = Path((seen / "folder").read_text().strip())
    until(lambda: not folder.exists(), "the end of the keys")
    process.communicate()


@pytest.mark.promise("tools.ssh")
def test_the_last_message_of_ssh_has_a_reader(site: StepSite, seen: Path) -> None:
    """Otherwise ssh prints a line about a broken pipe when the job has ended."""
    process = site.start("ssh", "--stdio", "7", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.read(14) == b"SSH-2.0-test\r\n"
    kill_with_children(site.step())
    assert process.stdout.read() == b""
    process.stdin.write(b"disconnect")
    process.stdin.flush()
    process.stdin.close()
    assert process.wait(WAIT_S) == 0
    assert seen


@pytest.mark.promise("tools.ssh")
def test_a_missing_sshd_is_one_line(site: StepSite, seen: Path) -> None:
    (site.folder / "bin/sshd").unlink()
    site.before(f"export PATH={site.folder}/bin:/usr/bin:/bin")
    if any(Path(folder, "sshd").exists() for folder in ("/usr/sbin", "/usr/local/sbin")):
        pytest.skip("this host has an sshd: run where openssh-server is not installed")
    assert site.run("ssh", "--stdio", "7", stdin=b"SSH-2.0-x\r\n") == (
        1,
        b"",
        "vhpc: the guest of n1 has no sshd: the image of job 7 lacks it (add it to the image "
        "(Debian: openssh-server), or use vhpc cp and vhpc forward)\n",
    )
    assert seen


@pytest.mark.parametrize(
    ("sshd", "expected"),
    [
        (
            "#!/bin/sh\necho 'config: line 3: Bad configuration option' >&2; exit 255\n",
            "the step in job 7 failed: config: line 3: Bad configuration option",
        ),
        ("#!/nonexistent\n", "the step in job 7 failed: vhpc-agent: cannot start"),
    ],
)
def test_an_sshd_that_does_not_start_is_one_line(
    site: StepSite, seen: Path, sshd: str, expected: str
) -> None:
    site.script("bin/sshd", sshd)
    code, out, said = site.run("ssh", "--stdio", "7", stdin=b"SSH-2.0-x\r\n")
    assert (code, out, len(said.splitlines())) == (1, b"", 1), said
    assert expected in said
    assert seen


def test_an_image_with_an_older_agent_is_named(site: StepSite, seen: Path) -> None:
    site.before("echo \"vhpc-agent: unrecognized option '--forward-to'\" >&2; exit 2")
    code, _, said = site.run("ssh", "--stdio", "7")
    assert (code, said) == (
        1,
        "vhpc: the image of the job cannot start sshd: its agent is older than this command "
        "(build or import the image again)\n",
    )
    assert seen


def test_ssh_gets_its_options_and_the_command(
    site: StepSite, seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.script("bin/ssh", '#!/bin/sh\nprintf "%s\\n" "$@"; exit 44\n')
    monkeypatch.setenv("PATH", f"{site.folder}/bin:{os.environ['PATH']}")
    code, out, _ = site.run("ssh", "7", "--node=n2", "--guest", "2", "-L", "1:x:2", "ls", "--node", "-h")
    words = out.decode().splitlines()
    place = words.index("vhpc-7-n2-g2")
    assert code == 44
    assert words[place + 1 :] == ["-L", "1:x:2", "ls", "--node", "-h"]
    assert all(word.startswith("-o") for word in words[:place])
    (proxy,) = [word for word in words if word.startswith("-oProxyCommand=")]
    assert proxy.endswith(" ssh --stdio --node n2 --guest 2 7")
    assert f'-oUserKnownHostsFile="{keys_of(site)}/known_hosts"' in words
    assert "-oStrictHostKeyChecking=yes" in words
    assert "Usage: vhpc ssh" in site.run("ssh", "7", "--help")[1].decode()
    assert seen


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("7", "--node", "n3"), 1, "job 7 is not on node n3: its nodes are n[1-2]"),
        (("7", "--guest", "3"), 1, "there is no guest 3 on n1: the job has 3 guests"),
        (("7", "--guest=x"), 2, "--guest needs a number"),
        (("7", "--node"), 2, "--node needs a name"),
        (("x",), 2, "JOBID"),
        ((), 2, "JOBID"),
        (("--stdio", "7"), 1, "--stdio needs pipes (it is for ssh's ProxyCommand; use: vhpc ssh JOBID)"),
    ],
)
def test_a_refused_ssh_is_one_line(
    site: StepSite, seen: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    process = site.start("ssh", *words)
    said = process.communicate(timeout=WAIT_S)[1].decode()
    assert (process.returncode, len(said.splitlines())) == (code, 1), said
    assert expected in said
    assert not list(seen.iterdir())


def settings(site: StepSite, host: str, text: bytes) -> dict[str, str]:
    """What ssh makes of a configuration."""
    (site.folder / "config").write_bytes(text)
    command = ["ssh", "-F", str(site.folder / "config"), "-G", host]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.partition(" ")[::2] for line in shown.splitlines())


@pytest.mark.promise("tools.ssh")
def test_ssh_reads_the_lines_of_ssh_config(site: StepSite, seen: Path) -> None:
    keys = keys_of(site)
    code, out, _ = site.run("ssh-config", "7", "--guest", "1")
    found = settings(site, "vhpc-7-g1", out)
    assert code == 0
    assert found["proxycommand"] == "vhpc ssh --stdio --guest 1 7"
    assert (found["hostkeyalias"], found["stricthostkeychecking"]) == ("vhpc", "true")
    assert found["userknownhostsfile"] == f"{keys}/known_hosts"
    assert found["identityfile"] == f"{keys}/id_ed25519"
    key = " ".join((keys / "host_key.pub").read_text().split()[:2])
    assert (keys / "known_hosts").read_text().startswith(f"vhpc {key} ")
    code, out, _ = site.run("ssh-config", "7", "--login", "me@login.example")
    found = settings(site, "vhpc-7", out)
    proxy = "ssh -o ClearAllForwardings=yes me@login.example vhpc ssh --stdio 7"
    assert (code, found["proxycommand"]) == (0, proxy)
    assert found["knownhostscommand"] == f"/bin/echo vhpc.login.example {key}"
    assert found["hostkeyalias"] == "vhpc.login.example"
    assert b"~/.ssh/authorized_keys on me@login.example" in out
    shown = json.loads(site.run("ssh-config", "7", "--login", "me@login.example", "--json")[1])
    assert (shown["host"], shown["options"]["ProxyCommand"]) == ("vhpc-7", proxy)
    assert b"PRIVATE" not in out
    for login in ("-oProxyCommand=x", "a b", "a;b", ""):
        code, out, said = site.run("ssh-config", "7", "--login", login)
        assert (code, out) == (1, b"")
        assert "is not a host name (give what follows ssh on your own computer)" in said
    assert seen


@pytest.mark.promise("tools.ssh")
def test_keys_are_made_once_and_only_their_user_reads_them(tmp_path: Path) -> None:
    made: list[bytes] = []

    def make() -> None:
        made.append(sshkeys.of_user(tmp_path).server_input())

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    folder = tmp_path / ".config/vhpc/ssh"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["ssh"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    (folder / "host_key").chmod(0o640)
    with pytest.raises(UserError, match=r"other users can use .*host_key.*run: chmod 600"):
        sshkeys.of_user(tmp_path)
    (folder / "host_key").chmod(0o600)
    folder.chmod(0o755)
    with pytest.raises(UserError, match=r"other users can use .*ssh: .*run: chmod 700"):
        sshkeys.of_user(tmp_path)
    folder.chmod(0o700)
    (folder / "id_ed25519").unlink()
    with pytest.raises(UserError, match=r"cannot use .*id_ed25519.*remove .*ssh; the next vhpc ssh makes"):
        sshkeys.of_user(tmp_path)


def test_keys_that_cannot_be_made_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".config").write_text("")
    with pytest.raises(UserError, match=r"cannot make keys in .*ssh: (Not a directory|File exists)"):
        sshkeys.of_user(tmp_path)
    (tmp_path / ".config").unlink()
    (tmp_path / "ssh-keygen").write_text("#!/bin/sh\necho 'no random numbers' >&2; exit 1\n")
    (tmp_path / "ssh-keygen").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh-keygen failed: no random numbers"):
        sshkeys.of_user(tmp_path)
    (tmp_path / "ssh-keygen").unlink()
    with pytest.raises(UserError, match=r"cannot run ssh-keygen: No such file.*install OpenSSH's client"):
        sshkeys.of_user(tmp_path)
    assert list((tmp_path / ".config/vhpc").iterdir()) == []
