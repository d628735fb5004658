# SPDX-License-Identifier: LGPL-3.0-or-later
"""User-space Kubernetes by an upstream Usernetes, and what a batch job needs around it."""
