# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a program needs: how its case is cut, and what its iterations are."""
