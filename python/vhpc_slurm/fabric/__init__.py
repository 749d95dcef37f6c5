# SPDX-License-Identifier: Apache-2.0
"""The job's network partition: allocation of identities, and backends that make them true."""
