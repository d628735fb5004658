# SPDX-License-Identifier: LGPL-3.0-or-later
"""One node of a cluster: from the outside, from the inside, and what runs in it."""
