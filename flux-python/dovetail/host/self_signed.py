# SPDX-License-Identifier: LGPL-3.0-or-later
"""The openssl command, and by it a certificate that is trusted by those who hold a copy of it.

Inputs: a private folder, a name, an address. Outputs: NAME.key and NAME.crt there. Invariants: no
key is ever an argument or in the environment; what openssl writes, only its owner can read; the
certificate is for a server alone, and signs no other.
"""

from __future__ import annotations

import ipaddress
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import WorkFailed

DAYS, BEFORE = 365, 7
"""How long a certificate is valid from now on, and since when it was: a clock may be set back."""


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


def alternative_names(hosts: Sequence[str]) -> str:
    """Hosts as openssl writes them: IP:… for addresses, DNS:… for names, of digits alone too."""

    def kind(host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return "DNS"
        return "IP"

    return ",".join(f"{kind(host)}:{host}" for host in hosts)


def self_signed(folder: Path, name: str, host: str) -> None:
    """Make NAME.key and NAME.crt for the server at `host`."""
    who = ("[req]", "prompt = no", "distinguished_name = who", "[who]", f"CN = {name}", "")
    asked = openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                    "-nodes", "-sha256", "-config", "/dev/stdin", "-keyout", f"{name}.key",
                    folder=folder, data="\n".join(who))  # fmt: skip
    lines = [
        "basicConstraints = critical,CA:FALSE", "keyUsage = critical,digitalSignature",
        "extendedKeyUsage = serverAuth", f"subjectAltName = {alternative_names([host])}",
    ]  # fmt: skip
    sign(folder, name, asked, lines)


def sign(folder: Path, name: str, asked: str, lines: Sequence[str], by: str = "") -> None:
    """Make NAME.crt of a signing request, with the extensions `lines`.

    It is signed by the authority BY.crt and BY.key, or where none is named by NAME.key itself.
    """
    whose = ["-cert", f"{by}.crt", "-keyfile", f"{by}.key"] if by else [
        "-selfsign", "-keyfile", f"{name}.key"]  # fmt: skip
    now = time.time()
    first, last = (
        time.strftime("%Y%m%d%H%M%SZ", time.gmtime(now + days * 86400)) for days in (-BEFORE, DAYS)
    )
    with tempfile.TemporaryDirectory(prefix=".sign-", dir=folder) as made:
        work = Path(made).name  # as it is called in there
        content = (
            "[ca]", "default_ca = us",
            "[us]", f"database = {work}/index", f"new_certs_dir = {work}", "default_md = sha256",
            "policy = any", "preserve = yes", "unique_subject = no", "rand_serial = yes",
            "x509_extensions = what",
            "[any]", "organizationName = optional", "commonName = supplied",
            "[what]", "subjectKeyIdentifier = hash", *lines, "",
        )  # fmt: skip
        Path(made, "config").write_text("\n".join(content))
        Path(made, "index").touch()
        openssl("ca", "-batch", "-notext", "-config", f"{work}/config", *whose,
                "-startdate", first, "-enddate", last, "-in", "/dev/stdin", "-out", f"{name}.crt",
                folder=folder, data=asked)  # fmt: skip
