# SPDX-License-Identifier: LGPL-3.0-or-later
"""The tables of the papers that Dovetail follows, run again on the user's machine."""
