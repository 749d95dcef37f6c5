# SPDX-License-Identifier: Apache-2.0
"""The tables of vhpcd's database in MariaDB: those of ``schema``, with the same columns and versions.

The server commits after each CREATE or ALTER, so a step is no transaction. Each of its
statements may therefore run twice, and the version is written after the last one.
"""

from __future__ import annotations

from vhpc_slurm.controller.store.schema import SCHEMA_VERSION
from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.errors import FabricError

_OPTIONS = "ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_LEASE = "FOREIGN KEY (lease) REFERENCES lease (id) ON DELETE CASCADE"

_BASE = (
    f"""CREATE TABLE IF NOT EXISTS lease (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    generation VARCHAR(64) NOT NULL UNIQUE,
    job_id BIGINT NOT NULL,
    state VARCHAR(16) NOT NULL,
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    body LONGBLOB NOT NULL,
    uid BIGINT,
    account VARCHAR(255),
    INDEX lease_job (job_id),
    INDEX lease_state (state, id),
    INDEX lease_uid (uid),
    INDEX lease_account (account)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS node (
    lease BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    taken DOUBLE,
    acknowledged DOUBLE,
    clean TINYINT,
    note MEDIUMTEXT NOT NULL DEFAULT (''),
    PRIMARY KEY (lease, node),
    {_LEASE}
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS timeline (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    lease BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    body LONGBLOB NOT NULL,
    UNIQUE (lease, node),
    {_LEASE}
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS key_epoch (
    epoch BIGINT PRIMARY KEY AUTO_INCREMENT,
    tag VARCHAR(16) NOT NULL
) {_OPTIONS}""",
    # The foreign key of an assignment is the reason why two owners cannot share a key.
    f"""CREATE TABLE IF NOT EXISTS key_owner (
    pkey INTEGER PRIMARY KEY CHECK (pkey BETWEEN 1 AND 131071),
    owner VARCHAR(255),
    freed BIGINT NOT NULL DEFAULT 0,
    UNIQUE (pkey, owner)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS key_claim (
    generation VARCHAR(64) PRIMARY KEY,
    pkey INTEGER NOT NULL,
    owner VARCHAR(255) NOT NULL,
    first_rank INTEGER NOT NULL CHECK (first_rank >= 0),
    ranks INTEGER NOT NULL CHECK (ranks > 0),
    rails INTEGER NOT NULL CHECK (rails > 0),
    vfs INTEGER NOT NULL CHECK (vfs > 0),
    state VARCHAR(16) NOT NULL,
    left_s DOUBLE NOT NULL,
    note MEDIUMTEXT NOT NULL,
    ports MEDIUMTEXT NOT NULL DEFAULT (''),
    FOREIGN KEY (pkey, owner) REFERENCES key_owner (pkey, owner)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS segment (
    vni INTEGER PRIMARY KEY CHECK (vni BETWEEN 1 AND 16777215),
    generation VARCHAR(64) UNIQUE,
    left_s DOUBLE,
    freed BIGINT NOT NULL DEFAULT 0,
    CHECK (generation IS NOT NULL OR left_s IS NULL)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS segment_share (
    generation VARCHAR(64) PRIMARY KEY,
    vni INTEGER NOT NULL,
    held TINYINT NOT NULL DEFAULT 1,
    FOREIGN KEY (vni) REFERENCES segment (vni)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS readiness (
    lease BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL CHECK (state IN ('waiting', 'passed', 'failed')),
    kind VARCHAR(255) NOT NULL,
    line MEDIUMTEXT NOT NULL,
    PRIMARY KEY (lease, node),
    INDEX readiness_state (lease, state),
    {_LEASE}
) {_OPTIONS}""",
    *(
        f"CREATE TABLE IF NOT EXISTS {table} (lease BIGINT PRIMARY KEY, body LONGBLOB NOT NULL, {_LEASE})"
        f" {_OPTIONS}"
        for table in ("ssh_key", "tunnel_key")
    ),
    f"""CREATE TABLE IF NOT EXISTS "usage" (
    lease BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    body LONGBLOB NOT NULL,
    PRIMARY KEY (lease, node),
    {_LEASE}
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS node_report (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    lease BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    body LONGBLOB NOT NULL,
    UNIQUE (lease, node),
    {_LEASE}
) {_OPTIONS}""",
    # Which vhpcd writes: see writership.
    f"""CREATE TABLE IF NOT EXISTS vhpc_writer (
    id INTEGER PRIMARY KEY,
    epoch BIGINT NOT NULL,
    serial BIGINT NOT NULL,
    holder VARCHAR(255) NOT NULL,
    seen DOUBLE NOT NULL
) {_OPTIONS}""",
)
_CHECKPOINTS = (
    f"""CREATE TABLE IF NOT EXISTS checkpoint (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    name VARCHAR(64) NOT NULL,
    uid BIGINT NOT NULL,
    account VARCHAR(255) NOT NULL,
    job_id BIGINT NOT NULL,
    generation VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL CHECK (state IN ('holding', 'saving', 'valid', 'failed', 'removed')),
    created DOUBLE NOT NULL,
    updated DOUBLE NOT NULL,
    stop TINYINT NOT NULL,
    requeue TINYINT NOT NULL,
    secret LONGBLOB NOT NULL,
    origin LONGBLOB NOT NULL,
    error MEDIUMTEXT NOT NULL,
    resumed_by VARCHAR(64) NOT NULL,
    INDEX checkpoint_generation (generation),
    INDEX checkpoint_name (uid, name),
    INDEX checkpoint_job (job_id),
    INDEX checkpoint_state (state)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS checkpoint_node (
    checkpoint BIGINT NOT NULL,
    node VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL,
    body LONGBLOB,
    PRIMARY KEY (checkpoint, node),
    FOREIGN KEY (checkpoint) REFERENCES checkpoint (id) ON DELETE CASCADE
) {_OPTIONS}""",
)
_CHECKPOINT_FIGURES = (
    "ALTER TABLE checkpoint ADD COLUMN IF NOT EXISTS paused_s DOUBLE",
    f"""CREATE TABLE IF NOT EXISTS checkpoint_size (
    checkpoint BIGINT PRIMARY KEY,
    bytes BIGINT NOT NULL,
    FOREIGN KEY (checkpoint) REFERENCES checkpoint (id) ON DELETE CASCADE
) {_OPTIONS}""",
)
_CLUSTERS = (
    f"""CREATE TABLE IF NOT EXISTS cluster (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    uid BIGINT NOT NULL,
    name VARCHAR(64) NOT NULL,
    created DOUBLE NOT NULL,
    version BIGINT NOT NULL DEFAULT 0,
    kept TINYINT NOT NULL DEFAULT 0,
    kept_until DOUBLE,
    UNIQUE (uid, name)
) {_OPTIONS}""",
    f"""CREATE TABLE IF NOT EXISTS cluster_member (
    id BIGINT PRIMARY KEY AUTO_INCREMENT,
    cluster BIGINT NOT NULL,
    generation VARCHAR(64) NOT NULL UNIQUE,
    first BIGINT NOT NULL,
    guests BIGINT NOT NULL,
    joined BIGINT,
    changed BIGINT NOT NULL DEFAULT 0,
    left_at DOUBLE,
    gone MEDIUMTEXT NOT NULL DEFAULT (''),
    body LONGBLOB NOT NULL,
    INDEX cluster_member_changed (cluster, changed),
    INDEX cluster_member_left (cluster, left_at),
    FOREIGN KEY (cluster) REFERENCES cluster (id) ON DELETE CASCADE
) {_OPTIONS}""",
)
_ACCOUNT_CLUSTERS = (
    "ALTER TABLE cluster ADD COLUMN IF NOT EXISTS account VARCHAR(64)",
    "ALTER TABLE cluster MODIFY COLUMN name VARCHAR(160) NOT NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS cluster_account ON cluster (account, name)",
    "ALTER TABLE cluster_member ADD COLUMN IF NOT EXISTS uid BIGINT NOT NULL DEFAULT 0",
    "UPDATE cluster_member SET uid = (SELECT uid FROM cluster WHERE cluster.id = cluster_member.cluster)",
)
_ROWS = (
    "INSERT IGNORE INTO key_epoch (epoch, tag) VALUES (0, '')",
    "INSERT IGNORE INTO vhpc_writer (id, epoch, serial, holder, seen) VALUES (1, 0, 0, '', 0)",
)
_VERSION = f"CREATE TABLE IF NOT EXISTS vhpc_schema (version INTEGER PRIMARY KEY) {_OPTIONS}"

STEPS: tuple[tuple[str, ...], ...] = (
    (*_BASE, *_ROWS),
    _CHECKPOINTS,
    _CHECKPOINT_FIGURES,
    _CLUSTERS,
    _ACCOUNT_CLUSTERS,
)
"""The steps from each version to the next, as in ``schema``. Each statement may run twice."""


def version(db: Database) -> int:
    """The version of the tables; 0 when there are none, or not all of the first."""
    tables = {name for (name,) in db.execute("SHOW TABLES")}
    if "vhpc_schema" not in tables:
        if tables:
            return -1
        return 0
    (found,) = db.execute("SELECT max(version) FROM vhpc_schema").fetchone()
    return int(found or 0)


def check(found: int, where: str) -> None:
    """FabricError when tables of this version are not for this vhpcd."""
    if found < 0:
        raise FabricError(
            f"cannot use the {where}",
            "it has tables of another program",
            "vhpcd needs a database of its own; see database.name in vhpc.toml",
        )
    if found > SCHEMA_VERSION:
        raise FabricError(
            f"cannot use the {where}",
            f"it has schema {found}",
            f"this vhpcd knows schema {SCHEMA_VERSION}; was it downgraded?",
        )


def prepare(db: Database, where: str) -> None:
    """Bring the tables to this version.

    Raises:
        FabricError: they are another program's, or of a newer vhpcd.
        EngineError: the server refuses a statement.
    """
    found = version(db)
    check(found, where)
    # First of all, so that what a killed vhpcd has left is known to be vhpcd's.
    db.execute(_VERSION)
    for number, statements in enumerate(STEPS[found:], start=found + 1):
        for statement in statements:
            db.execute(statement)
        # another vhpcd may do the same at the same time
        db.execute("INSERT IGNORE INTO vhpc_schema (version) VALUES (?)", (number,))
