# SPDX-License-Identifier: Apache-2.0
"""Images and containers of a real registry, on the loopback of the login host."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import pytest
from busybox import docker_archive
from cluster import IMAGE, Job, Lab

pytestmark = pytest.mark.lab

PORT = 5443
PLACE = f"docker://127.0.0.1:{PORT}"
FOLDER = "/run/test-registry"
TRUST = ("env", f"SSL_CERT_FILE={FOLDER}/cert.pem")
START = f"""
set -e
mkdir -m 755 {FOLDER}; cd {FOLDER}
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 \\
    -keyout key.pem -out cert.pem 2>/dev/null
cat > config.yml <<END
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {FOLDER}/data}}}}
http: {{addr: "127.0.0.1:{PORT}", tls: {{certificate: {FOLDER}/cert.pem, key: {FOLDER}/key.pem}}}}
END
setsid docker-registry serve config.yml >log 2>&1 </dev/null & echo $! > pid
listening=":$(printf %X {PORT}) 00000000:0000 0A"
for _ in $(seq 100); do grep -q "$listening" /proc/net/tcp && exit 0; sleep 0.1; done
cat log >&2; exit 1
"""


@pytest.fixture(scope="module")
def registry(lab: Lab) -> Iterator[str]:
    lab.run("login", "sh", "-c", START)
    yield PLACE
    lab.run("login", "sh", "-c", f"kill $(cat {FOLDER}/pid); rm -rf {FOLDER}")
    for user in ("alice", "bob"):
        lab.run("login", "rm", "-rf", f"/scratch/{user}", user=user)


@pytest.fixture(scope="module")
def pushed(lab: Lab, registry: str) -> str:
    """An image of the site, as vhpc image push puts it into the registry."""
    target = f"{registry}/site/minimal:1"
    done = lab.run("login", *TRUST, "vhpc", "image", "push", IMAGE, target, user="alice", timeout=300)
    assert re.fullmatch(rf"{target} sha256:[0-9a-f]{{64}}\n", done.out)
    return target


def test_an_image_has_its_digest_on_the_other_side(lab: Lab, pushed: str) -> None:
    digest = lab.run("ctl", "cat", f"/shared/vhpc/catalog/names/{IMAGE}/latest").out.strip()
    pulled = lab.run("login", *TRUST, "vhpc", "image", "pull", pushed, "own/got", user="bob", timeout=300)
    assert pulled.out.split() == ["own/got:latest", digest]
    job = lab.finish("uname -r; srun hostname", "-w", "n1", user="bob", image="own/got")
    assert job.accounted("State,AdminComment") == ["COMPLETED", f"vhpc: image own/got:latest@{digest}"]
    assert job.output().splitlines()[-1] == "n1"


@pytest.fixture(scope="module")
def container(lab: Lab, registry: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The busybox container, as docker push puts it into the registry."""
    encoded = base64.b64encode(docker_archive(tmp_path_factory.mktemp("box")).read_bytes()).decode()
    lab.run("login", "sh", "-c", "base64 -d > pushed.tar", user="alice", stdin=encoded)
    target = f"{registry}/site/box:1"
    copy = ("skopeo", "copy", "--quiet", "docker-archive:pushed.tar", target)
    lab.run("login", *TRUST, *copy, user="alice", timeout=120)
    lab.run("login", "rm", "pushed.tar", user="alice")
    return target


@pytest.mark.parametrize("kind", ["image", "container"])
def test_a_job_names_an_image_of_a_registry(lab: Lab, pushed: str, container: str, kind: str) -> None:
    source = container if kind == "container" else pushed
    words = (*TRUST, "sbatch", "--parsable", f"--vhpc-image={source}", "-w", "n1")
    script = "#!/bin/sh\nhostname; srun sh -c 'echo ${GREETING:-no greeting}'\n"
    for word in ("now", "already"):
        done = lab.run("login", *words, user="alice", stdin=script, timeout=300)
        assert done.err.splitlines()[-1].endswith(f" {word}"), done.err
    job = Job(lab, int(done.out), "alice")
    assert job.wait() == "COMPLETED", job.output()
    greeting = "hello from the image" if kind == "container" else "no greeting"
    assert job.output().splitlines() == ["n1", greeting]


def test_a_kind_is_not_taken_for_the_other(lab: Lab, registry: str, pushed: str, container: str) -> None:
    for words, says in (
        (("import", pushed, "own/x"), "vhpc image pull"),
        (("pull", container, "own/x"), "vhpc image import"),
        (("pull", f"{registry}/site/none:1", "own/x"), "site/none:1"),
    ):
        done = lab.run("login", *TRUST, "vhpc", "image", *words, user="alice", check=False, timeout=120)
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("vhpc: cannot ")
        assert says in done.err.splitlines()[-1]


def test_a_difference_of_images_is_shown(lab: Lab, container: str) -> None:
    for tag, word in (("old", "one"), ("new", "another")):
        made = f"mkdir -p diff/etc; echo {word} > diff/etc/word; vhpc image import diff own/differ:{tag}"
        lab.run("login", "sh", "-c", made, user="alice", timeout=300)
    compare = ("vhpc", "image", "diff", "own/differ:old")
    same = lab.run("login", *compare, "own/differ:old", user="alice", timeout=300)
    assert same.out == "no difference\n"
    done = lab.run("login", *compare, "own/differ:new", user="alice", check=False, timeout=300)
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if not line.startswith("manifest ")]
    assert line.startswith("~ etc/word  size 4 -> 8")
    lab.run("login", "rm", "-r", "diff", user="alice")


TRUSTED = f"127.0.0.1:{PORT}/signed"
POLICY = f"""
set -e
mkdir -p /etc/containers/keys /etc/containers/registries.d; cd /etc/containers
cp policy.json {FOLDER}/policy.json
printf 'passphrase of the test' > {FOLDER}/passphrase
skopeo generate-sigstore-key --output-prefix {FOLDER}/site --passphrase-file {FOLDER}/passphrase >/dev/null
chmod 644 {FOLDER}/site.* {FOLDER}/passphrase; cp {FOLDER}/site.pub keys/site.pub
cat > policy.json <<END
{{"default": [{{"type": "insecureAcceptAnything"}}],
 "transports": {{"docker": {{"{TRUSTED}": [{{"type": "sigstoreSigned",
   "keyPath": "/etc/containers/keys/site.pub", "signedIdentity": {{"type": "matchRepository"}}}}]}}}}}}
END
printf 'docker:\n  127.0.0.1:{PORT}:\n    use-sigstore-attachments: true\n' > registries.d/test.yaml
"""
RESTORE = f"""
cd /etc/containers; cp {FOLDER}/policy.json policy.json; rm -r registries.d/test.yaml keys
"""


@pytest.fixture
def signed(lab: Lab, container: str) -> Iterator[str]:
    """The container twice in a part of the registry where the site demands signatures; one has it."""
    lab.run("login", "sh", "-c", POLICY)
    key = (
        f"--sign-by-sigstore-private-key={FOLDER}/site.private",
        f"--sign-passphrase-file={FOLDER}/passphrase",
    )
    for name, options in (("box:1", key), ("other:1", ())):
        copy = ("skopeo", "copy", "--quiet", *options, container, f"docker://{TRUSTED}/{name}")
        lab.run("login", *TRUST, *copy, user="alice", timeout=120)
    yield f"docker://{TRUSTED}"
    lab.run("login", "sh", "-c", RESTORE)


def test_a_site_demands_signatures_of_containers(lab: Lab, signed: str) -> None:
    """sigstore's, as cosign makes them; skopeo checks them by the site's containers-policy.json."""
    words = (*TRUST, "vhpc", "image", "import")
    lab.run("login", *words, f"{signed}/box:1", "own/signed", user="alice", timeout=300)
    done = lab.run("login", *words, f"{signed}/other:1", "own/no", user="alice", check=False, timeout=300)
    assert done.code == 1
    assert "A signature was required, but no signature exists" in done.err.splitlines()[-1]
    assert "own/no" not in lab.run("login", "vhpc", "image", "ls", "--own", user="alice").out
