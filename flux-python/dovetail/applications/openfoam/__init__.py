# SPDX-License-Identifier: LGPL-3.0-or-later
"""OpenFOAM: its meshes, and how a case is cut for ranks of any weight."""
