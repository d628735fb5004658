# SPDX-License-Identifier: LGPL-3.0-or-later
"""What tests share: clusters, instances, programs, and looks for what is left."""
