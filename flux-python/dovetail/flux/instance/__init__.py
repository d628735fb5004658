# SPDX-License-Identifier: LGPL-3.0-or-later
"""What Dovetail knows and decides in one Flux instance. Pure."""
