# SPDX-License-Identifier: Apache-2.0
"""Rights of users to see, keep and remove clusters.  Pure."""
# Decision: Clusters of an account

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.store.clusters import StoredCluster
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Viewer
from vhpc_slurm.options import cluster_account
from vhpc_slurm.policy import PolicyError
from vhpc_slurm.policy import clusters as limits


class ClusterAccess:
    """Rights of users; ``viewer`` is None for root and SlurmUser, who may do everything.

    A user's cluster belongs to the user alone. One of an account is seen by all users of the account. Those
    whom the policy permits to create it may keep and remove it, and so may coordinators of the account.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules

    def accounts(self, viewer: Viewer | None) -> tuple[str, ...]:
        """Accounts whose clusters a user sees."""
        return () if viewer is None else tuple(dict.fromkeys((*viewer.member_of, *viewer.accounts)))

    def seen(self, cluster: StoredCluster | None, serial: int, viewer: Viewer | None) -> StoredCluster:
        """The cluster, if the user sees it.

        Raises:
            UserError: as if there were none.
        """
        if cluster is not None and (
            viewer is None
            or viewer.everything
            or (
                cluster.uid == viewer.uid
                if cluster.account is None
                else cluster.account in self.accounts(viewer)
            )
        ):
            return cluster
        raise UserError(f"there is no cluster of number {serial}", "", "see: vhpc cluster ls")

    def must_change(self, cluster: StoredCluster, viewer: Viewer | None) -> None:
        """PolicyError if a user may only see a cluster."""
        if cluster.account is not None:
            self._rules_of(cluster.name, viewer)

    def kept_s(self, name: str, for_s: float | None, viewer: Viewer | None) -> float | None:
        """How long a user keeps a cluster, who asks for ``for_s``; None: without limit.

        Raises:
            PolicyError: the policy does not permit the user to keep it, or not so long.
            UserError: Slurm has not told the user's rights.
        """
        rules = self._rules_of(name, viewer)
        longest = limits.longest_s(rules)
        if longest is None:
            return for_s
        if longest == 0 or (for_s or 0) > longest:
            days = f"{longest / limits.DAY_S:.0f} days at most" if longest else "no clusters"
            raise PolicyError(f"cluster {name} is not kept", f"the policy of the site permits to keep {days}")
        return longest if for_s is None else for_s

    def _rules_of(self, name: str, viewer: Viewer | None) -> list[Rule | None]:
        """Rules that permit a user to keep or remove a cluster."""
        account = cluster_account(name)
        if viewer is None or viewer.everything or (account and account in viewer.accounts):
            return [None]
        if not viewer.user and (account or self._rules):
            raise UserError(
                "vhpcd does not know your accounts", "Slurm has not answered", "try again in a minute"
            )
        if account and account not in viewer.member_of:
            raise PolicyError(
                f"cluster {name} is not yours",
                f"Slurm has no association of {viewer.user} with account {account}",
            )
        found = limits.of_user(self._rules, viewer.user, name)
        if not found:
            raise PolicyError(
                f"cluster {name} is not yours to keep or remove",
                f"no policy rule permits {viewer.user} to create clusters of account {account}",
                "see: vhpc policy explain",
            )
        return found
