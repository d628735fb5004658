# SPDX-License-Identifier: LGPL-3.0-or-later
"""The openssl command, and by it a certificate that is trusted by those who hold a copy of it.

Inputs: a private folder, a name, an address. Outputs: NAME.key and NAME.crt there. Invariants: no
key is ever an argument or in the environment; what openssl writes, only its owner can read; the
certificate is for a server alone, and signs no other.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from dovetail.core.errors import WorkFailed

DAYS = 365
"""How long a certificate is valid."""


def openssl(*words: str, folder: Path, data: str = "") -> str:
    """What the command prints that works in `folder` and reads `data`; WorkFailed if it fails."""
    try:
        done = subprocess.run(
            ["openssl", *words], cwd=folder, input=data, capture_output=True, text=True, umask=0o077
        )
    except FileNotFoundError:
        raise WorkFailed("openssl is not installed; see `dovetail doctor`") from None
    if done.returncode:
        raise WorkFailed(f"openssl {words[0]}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def alternative_names(hosts: list[str]) -> str:
    """Hosts as openssl writes them: IP:… for addresses, DNS:… for names."""
    return ",".join(f"{'IP' if h.replace('.', '').isdigit() else 'DNS'}:{h}" for h in hosts)


def self_signed(folder: Path, name: str, host: str) -> None:
    """Make NAME.key and NAME.crt for the server at `host`."""
    lines = (
        "[req]", "prompt = no", "distinguished_name = who", "x509_extensions = what",
        "[who]", f"CN = {name}",
        "[what]", "basicConstraints = critical,CA:FALSE", "keyUsage = critical,digitalSignature",
        "subjectKeyIdentifier = hash", "extendedKeyUsage = serverAuth",
        f"subjectAltName = {alternative_names([host])}",
    )  # fmt: skip
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-sha256", "-days", str(DAYS), "-config", "/dev/stdin", "-keyout", f"{name}.key",
            "-out", f"{name}.crt", folder=folder, data="\n".join(lines) + "\n")  # fmt: skip
