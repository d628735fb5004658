# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether user-space Kubernetes can run here, and how to fix what is missing."""
