# SPDX-License-Identifier: LGPL-3.0-or-later
"""Keys, certificates and kubeconfigs of a cluster, made by the openssl command.

Inputs: names and addresses. Outputs: files in the cluster's private `pki/`. Invariants: no
key is ever an argument or in the environment; every certificate names one use, client or
server; one authority for each cluster, so that clusters do not trust each other.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dovetail.host.private_files import write_private
from dovetail.host.self_signed import alternative_names, openssl, sign

_CLIENT, _SERVER = "extendedKeyUsage=clientAuth", "extendedKeyUsage=serverAuth"


def key(folder: Path, name: str) -> None:
    """Make NAME.key, an elliptic curve key: as strong as RSA 3072 and much faster to make."""
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key",
            folder=folder)  # fmt: skip


def public_key(folder: Path, name: str) -> None:
    """Write NAME.pub beside NAME.key."""
    openssl("ec", "-in", f"{name}.key", "-pubout", "-out", f"{name}.pub", folder=folder)


def request(folder: Path, name: str, subject: str, hosts: Sequence[str] = ()) -> str:
    """A signing request for NAME.key, PEM: for a server if it names hosts."""
    more = ["req_extensions = what", "[what]", f"subjectAltName = {alternative_names(hosts)}"]
    lines = ["[req]", "distinguished_name = who", *(more if hosts else []), "[who]", ""]
    return openssl("req", "-new", "-key", f"{name}.key", "-subj", subject,
                   "-config", "/dev/stdin", folder=folder, data="\n".join(lines))  # fmt: skip


def authority(folder: Path, cluster: str) -> None:
    """Make ca.key and ca.crt."""
    key(folder, "ca")
    asked = request(folder, "ca", f"/CN=dovetail-{cluster}")
    _sign(folder, "ca", asked, "CA:TRUE", "keyCertSign,cRLSign", [])


def certificate(folder: Path, name: str, subject: str, hosts: list[str] | None = None) -> None:
    """Make NAME.key and NAME.crt: for a server if it names hosts, else for a client."""
    key(folder, name)
    lines = [_CLIENT]
    if hosts:
        lines = [_SERVER, f"subjectAltName={alternative_names(hosts)}"]
    _sign(folder, name, request(folder, name, subject), "CA:FALSE", "digitalSignature", lines)


def issued(folder: Path, asked: str, names: str = "") -> str:
    """The certificate for a signing request, both PEM: for a server if it has `names`.

    These are as openssl writes them. Neither the request nor they are looked at.
    """
    lines = [_SERVER, f"subjectAltName={names}"] if names else [_CLIENT]
    with tempfile.TemporaryDirectory(prefix=".issued-", dir=folder) as made:
        name = f"{Path(made).name}/it"
        _sign(folder, name, asked, "CA:FALSE", "digitalSignature", lines)
        return Path(made, "it.crt").read_text()


def _sign(
    folder: Path,
    name: str,
    asked: str,
    constraints: str,
    usage: str,
    lines: list[str],
) -> None:
    basic = [f"basicConstraints=critical,{constraints}", f"keyUsage=critical,{usage}"]
    by = "" if name == "ca" else "ca"
    sign(folder, name, asked, [*basic, *lines], by)


def kubeconfig(path: Path, server: str, authority: Path, user: dict[str, str]) -> None:
    """Write a kubeconfig for one user: {"crt": FILE, "key": FILE} or {"pem": FILE}.

    The last has both, is only named, and may be replaced by a later one.
    """
    if "pem" in user:
        identity = {"client-certificate": user["pem"], "client-key": user["pem"]}
    else:
        identity = {"client-certificate-data": _encoded(Path(user["crt"])),
                    "client-key-data": _encoded(Path(user["key"]))}  # fmt: skip
    cluster = {"server": server, "certificate-authority-data": _encoded(authority)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "dovetail", "cluster": cluster}],
        "users": [{"name": "dovetail", "user": identity}],
        "contexts": [{"name": "dovetail", "context": {"cluster": "dovetail", "user": "dovetail"}}],
        "current-context": "dovetail",
    }
    write_private(path, json.dumps(content, indent=1) + "\n")


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
