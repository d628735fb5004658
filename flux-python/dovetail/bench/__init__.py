# SPDX-License-Identifier: LGPL-3.0-or-later
"""The comparisons behind `dovetail bench`: interleaved, repeated, with the spread."""
