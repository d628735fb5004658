# SPDX-License-Identifier: LGPL-3.0-or-later
"""Loads the broker module into an instance that was started without --dovetail.

Output: the table `dovetail` in the instance's configuration, the module, and the variable by
which flux-modprobe(1) finds the module again to remove it when the instance ends: a module
that nobody removes makes the broker fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.flux import client, option

PACKAGE = Path(__file__).resolve().parents[1]
VARIABLE = "FLUX_MODPROBE_PATH_APPEND"


def flux(*words: str, given: str | None = None) -> str:
    """Run one of Flux's own commands."""
    done = subprocess.run(["flux", *words], input=given, capture_output=True, text=True)
    if done.returncode:
        raise WorkFailed(f"flux {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def load(text: str) -> None:
    """Start what --dovetail=TEXT asks for, unless something is there already."""
    wanted = option.parse(text)
    try:
        client.call("dovetail.status")
    except BadInput as error:
        if str(error) != client.NOT_LOADED:
            raise
    else:
        raise BadInput("--dovetail: Dovetail is loaded here already; see `flux dovetail resize`")
    command = shutil.which("flux-dovetail", path=os.environ.get("FLUX_EXEC_PATH", ""))
    if not command:
        raise BadInput('flux-dovetail is not on FLUX_EXEC_PATH; type eval "$(dovetail env)" first')
    whole = json.loads(flux("config", "get"))
    whole["dovetail"] = {**whole.get("dovetail", {}), **wanted.plain(), "command": command}
    flux("config", "load", given=json.dumps(whole))
    for plugin in option.plugins():
        flux("jobtap", "load", plugin)
    paths = [os.environ.get(VARIABLE, ""), str(PACKAGE / option.FOLDERS[VARIABLE])]
    client.call("broker.setenv", {"env": {VARIABLE: ":".join(filter(None, paths))}})
    flux("module", "load", str(PACKAGE / "flux" / "plugins" / "modules" / "dovetail.py"))
