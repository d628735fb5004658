# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a run on a cluster keeps of itself in its directory, for whoever resumes it.

Inputs: the run's directory. Outputs: the run's id, and where and as what its pods are. Invariant:
it is kept as long as something of the run may be on the cluster.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.host.private_files import looking, write_private

FOLDER = "kubernetes"
"""Below the run's directory, private: this, and what agents trust the run by."""
FILE = "run.json"
"""In `FOLDER`."""


@dataclass(frozen=True)
class Identity:
    """A run's id, its pods' network, the kind of what makes them, and their cluster.

    The kind is empty until it is chosen; of `kubeconfig` earlier versions did not say.
    """

    run: str
    network: str
    launcher: str = ""
    kubeconfig: str = ""

    def keep(self, own: Path) -> None:
        """Write it down in the run's private folder."""
        write_private(own / FILE, json.dumps(asdict(self)) + "\n")


def begin(own: Path, resume: bool, network: str, kubeconfig: str = "") -> Identity:
    """That of a run which is resumed, or of a new one; it is kept in the private folder `own`.

    `network` is empty for that of the run so far, at first that of nodes. BadInput where the folder
    is of no run, or what is in it is damaged.
    """
    file = own / FILE
    found = Identity(secrets.token_hex(3), network or "host", "", kubeconfig)
    if not resume and own.exists() and not file.exists() and (own.is_file() or any(own.iterdir())):
        raise BadInput(f"{own}: is of no run, and would be replaced; choose another -o")
    if resume and file.exists():
        try:
            kept = json.loads(file.read_text())
            found = Identity(
                str(kept["run"]),
                network or str(kept.get("network", "")) or found.network,
                str(kept.get("launcher", "")),
                str(kept.get("kubeconfig", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{file}: is damaged; the run cannot be resumed on a cluster") from None
    own.mkdir(mode=0o700, exist_ok=True)
    found.keep(own)
    return found


def check_over(directory: Path) -> None:
    """Refuse to go on here with a run that may still have pods somewhere. Raises BadInput."""
    own, there = directory / FOLDER, ""
    with looking(own):
        if not (own / FILE).exists():
            return
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        there = str(json.loads((own / FILE).read_text()).get("kubeconfig", ""))
    raise BadInput(
        f"{directory}: the run is on {f'the cluster of {there}' if there else 'a cluster'}, where "
        f"its pods may go on; resume it with --kubeconfig {shlex.quote(there or 'FILE')}, or, if "
        f"that cluster is gone, remove {own} first"
    )
