# SPDX-License-Identifier: Apache-2.0
"""The tables of vhpcd's database, and how those of an older vhpcd become these.

Each step is one transaction: a vhpcd that is killed in it finds the old schema.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError

APPLICATION = 0x76687063  # "vhpc"; PRAGMA application_id, so that file(1) and we know it

# `uid` and `account` say who may see a lease: its owner, and coordinators of its account. `node_report`
# has what nodes tell the owner, `usage` what programs have used in the guests of a node.
_LEASES = """
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    generation TEXT NOT NULL UNIQUE,
    job_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    body BLOB NOT NULL,
    uid INTEGER,
    account TEXT
) STRICT;
CREATE INDEX lease_job ON lease (job_id);
CREATE INDEX lease_live ON lease (id) WHERE state <> 'released';
CREATE INDEX lease_uid ON lease (uid);
CREATE INDEX lease_account ON lease (account);
CREATE TABLE node (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    taken REAL,
    acknowledged REAL,
    clean INTEGER,
    note TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (lease, node)
) STRICT, WITHOUT ROWID;
CREATE TABLE timeline (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (lease, node)
) STRICT;
CREATE TABLE usage (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (lease, node)
) STRICT, WITHOUT ROWID;
CREATE TABLE node_report (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (lease, node)
) STRICT;
"""

# The foreign key of an assignment is the reason why two owners cannot share a key, whatever the code does.
# VLANs have numbers above those of partition keys. `ports` has GUIDs of the ports' own, as words; it is
# empty where nodes set GUIDs that follow from the key.
_KEYS = """
CREATE TABLE key_epoch (
    epoch INTEGER PRIMARY KEY AUTOINCREMENT,
    tag TEXT NOT NULL
) STRICT;
INSERT INTO key_epoch (epoch, tag) VALUES (0, '');
CREATE TABLE key_owner (
    pkey INTEGER PRIMARY KEY CHECK (pkey BETWEEN 1 AND 131071),
    owner TEXT,
    freed INTEGER NOT NULL DEFAULT 0,
    UNIQUE (pkey, owner)
) STRICT;
CREATE TABLE key_claim (
    generation TEXT PRIMARY KEY,
    pkey INTEGER NOT NULL,
    owner TEXT NOT NULL,
    first_rank INTEGER NOT NULL CHECK (first_rank >= 0),
    ranks INTEGER NOT NULL CHECK (ranks > 0),
    rails INTEGER NOT NULL CHECK (rails > 0),
    vfs INTEGER NOT NULL CHECK (vfs > 0),
    state TEXT NOT NULL,
    left_s REAL NOT NULL,
    note TEXT NOT NULL,
    ports TEXT NOT NULL DEFAULT '',
    FOREIGN KEY (pkey, owner) REFERENCES key_owner (pkey, owner)
) STRICT, WITHOUT ROWID;
CREATE INDEX key_claim_pkey ON key_claim (pkey);
"""

# VNIs of job networks. One that a generation holds has no left_s, one in quarantine has its remaining
# seconds; a free one has no generation and no left_s, and `freed` counts in which order they became free.
# Components of heterogeneous jobs that hold a VNI together, its first owner among them, are in segment_share;
# `held` is 0 for one that no longer holds it.
_SEGMENTS = """
CREATE TABLE segment (
    vni INTEGER PRIMARY KEY CHECK (vni BETWEEN 1 AND 16777215),
    generation TEXT UNIQUE,
    left_s REAL,
    freed INTEGER NOT NULL DEFAULT 0,
    CHECK (generation IS NOT NULL OR left_s IS NULL)
) STRICT;
CREATE TABLE segment_share (
    generation TEXT PRIMARY KEY,
    vni INTEGER NOT NULL REFERENCES segment (vni),
    held INTEGER NOT NULL DEFAULT 1
) STRICT, WITHOUT ROWID;
CREATE INDEX segment_share_vni ON segment_share (vni);
"""

# Reports of nodes before a job with a network starts; `kind` and `line` are an error of `failed`.
_READINESS = """
CREATE TABLE readiness (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'passed', 'failed')),
    kind TEXT NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (lease, node)
) STRICT, WITHOUT ROWID;
CREATE INDEX readiness_state ON readiness (lease, state);
"""

# Keys for ssh between the guests of a generation, and of the WireGuard tunnels between its nodes; secret.
_SECRETS = """
CREATE TABLE ssh_key (
    lease INTEGER PRIMARY KEY REFERENCES lease (id) ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;
CREATE TABLE tunnel_key (
    lease INTEGER PRIMARY KEY REFERENCES lease (id) ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;
"""

# Checkpoints of jobs, and what each node has reported last about one. `origin` is the lease that was saved,
# which a checkpoint outlives; `secret` is the key of its seals; `resumed_by` is the generation that continues
# it.
_CHECKPOINTS = """
CREATE TABLE checkpoint (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    uid INTEGER NOT NULL,
    account TEXT NOT NULL,
    job_id INTEGER NOT NULL,
    generation TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('holding', 'saving', 'valid', 'failed', 'removed')),
    created REAL NOT NULL,
    updated REAL NOT NULL,
    stop INTEGER NOT NULL,
    requeue INTEGER NOT NULL,
    secret BLOB NOT NULL,
    origin BLOB NOT NULL,
    error TEXT NOT NULL,
    resumed_by TEXT NOT NULL
) STRICT;
CREATE INDEX checkpoint_generation ON checkpoint (generation);
CREATE INDEX checkpoint_name ON checkpoint (uid, name);
CREATE INDEX checkpoint_job ON checkpoint (job_id);
CREATE INDEX checkpoint_state ON checkpoint (state);
CREATE TABLE checkpoint_node (
    checkpoint INTEGER NOT NULL REFERENCES checkpoint (id) ON DELETE CASCADE,
    node TEXT NOT NULL,
    state TEXT NOT NULL,
    body BLOB,
    PRIMARY KEY (checkpoint, node)
) STRICT, WITHOUT ROWID;
"""

# The pause of a checkpoint, and its bytes: expected while it is made, measured when it is valid. Those of an
# older vhpcd have neither.
_CHECKPOINT_FIGURES = """
ALTER TABLE checkpoint ADD COLUMN paused_s REAL;
CREATE TABLE checkpoint_size (
    checkpoint INTEGER PRIMARY KEY REFERENCES checkpoint (id) ON DELETE CASCADE,
    bytes INTEGER NOT NULL
) STRICT;
"""

# Named clusters of users. `version` rises with each change; members have the version of their last change and
# of their joining, which is NULL until their guests are ready. `left_at` is when a member has left; its
# addresses, the numbers from `first` on, are not used again for an hour. `gone` has ranks of guests that
# have ended or whose node is silent.
_CLUSTERS = """
CREATE TABLE cluster (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    uid INTEGER NOT NULL,
    name TEXT NOT NULL,
    created REAL NOT NULL,
    version INTEGER NOT NULL DEFAULT 0,
    kept INTEGER NOT NULL DEFAULT 0,
    kept_until REAL,
    UNIQUE (uid, name)
) STRICT;
CREATE TABLE cluster_member (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    cluster INTEGER NOT NULL REFERENCES cluster (id) ON DELETE CASCADE,
    generation TEXT NOT NULL UNIQUE,
    first INTEGER NOT NULL,
    guests INTEGER NOT NULL,
    joined INTEGER,
    changed INTEGER NOT NULL DEFAULT 0,
    left_at REAL,
    gone TEXT NOT NULL DEFAULT '',
    body BLOB NOT NULL
) STRICT;
CREATE INDEX cluster_member_changed ON cluster_member (cluster, changed);
CREATE INDEX cluster_member_left ON cluster_member (cluster, left_at);
"""

# Clusters of accounts: `uid` is who made one, and its name begins with the account. `account` is NULL for
# those of users. Members have the uid of their job.
_ACCOUNT_CLUSTERS = """
ALTER TABLE cluster ADD COLUMN account TEXT;
CREATE UNIQUE INDEX cluster_account ON cluster (account, name);
ALTER TABLE cluster_member ADD COLUMN uid INTEGER NOT NULL DEFAULT 0;
UPDATE cluster_member SET uid = (SELECT uid FROM cluster WHERE cluster.id = cluster_member.cluster);
"""

STEPS: tuple[str, ...] = (
    _LEASES + _KEYS + _SEGMENTS + _READINESS + _SECRETS,
    _CHECKPOINTS,
    _CHECKPOINT_FIGURES,
    _CLUSTERS,
    _ACCOUNT_CLUSTERS,
)
"""What leads from each version to the next; version 0 is an empty file."""
SCHEMA_VERSION = len(STEPS)


def check(db: sqlite3.Connection, path: str | Path) -> int:
    """The schema version of a database, 0 for an empty one; changes nothing.

    Raises:
        FabricError: it is not ours, or of a newer vhpcd.
        sqlite3.Error: it cannot be read.
    """
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    fresh = not (application or version or tables)
    if not fresh and (application != APPLICATION or not 0 < version <= SCHEMA_VERSION):
        raise FabricError(
            f"cannot use the database {path}",
            f"it has schema {version} of application {application:#x}",
            f"this vhpcd knows schema {SCHEMA_VERSION} of {APPLICATION:#x}; was it downgraded?",
        )
    return int(version)


def prepare(db: sqlite3.Connection, path: str | Path) -> None:
    """Bring the database to this version; the one of an older version is first copied to ``PATH.schema-N``.

    Raises:
        FabricError: as ``check``, or the copy cannot be written.
        sqlite3.Error: it cannot be read or written.
    """
    version = check(db, path)
    if 0 < version < SCHEMA_VERSION and str(path) != ":memory:":
        _keep(db, Path(path), version)
    for number in range(version, SCHEMA_VERSION):
        db.executescript(
            f"BEGIN IMMEDIATE; {STEPS[number]} PRAGMA application_id = {APPLICATION};"
            f"PRAGMA user_version = {number + 1}; COMMIT;"
        )


def _keep(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy the database, as the older vhpcd can use it if an operator goes back to it."""
    copy = path.with_name(f"{path.name}.schema-{version}")
    part = copy.with_name(f"{copy.name}.part")
    try:
        files.write_beside(copy, part, b"")  # SQLite fills an empty file, with its mode
        db.execute("VACUUM INTO ?", (str(part),))
        files.sync_file(part)
        part.replace(copy)
        files.sync_folder(path.parent)
    except OSError as err:
        raise FabricError(
            f"the database {path} is not migrated: its copy {copy} cannot be written",
            str(err),
            "make the folder writable, or make room on its disk",
        ) from err
