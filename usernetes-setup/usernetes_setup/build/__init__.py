# SPDX-License-Identifier: LGPL-3.0-or-later
"""Gets every program of a node, once for all checkouts and clusters."""
