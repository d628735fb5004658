# SPDX-License-Identifier: LGPL-3.0-or-later
"""One Linux machine: processes, control groups, files. The standard library only."""
