# SPDX-License-Identifier: LGPL-3.0-or-later
"""User-space Kubernetes, provider `native`: its components straight in namespaces.

Only the standard library is used, since these verbs run on login and compute nodes before
anything is installed there; `usernetes-setup/` has them as plain scripts.

A node is one monitor (`node/monitor.py`) outside, and one supervisor (`node/supervisor.py`) that is
process 1 of a private process namespace and starts every component. Whichever of the two
dies, the other cleans up: processes, control groups, files. Mounts and ports go with the
processes. Everything that a node writes is in one private folder (`node_record.py`).
"""
