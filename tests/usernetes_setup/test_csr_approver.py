# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which signing requests are approved: the node's own, and none that asks for more.

The requests are made by the openssl command, or put together byte by byte where it would not make
them. They are read by the program of the build, so that most of this needs it (tier kube).
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail.core.errors import WorkFailed
from support.clusters import eventually, record
from usernetes_setup.control import api_client, certificates, csr_approver
from usernetes_setup.control.csr_approver import CLIENT, SERVING

GROUP, NAME = ("O", "system:nodes"), ("CN", "system:node:n1")
OWN_NAMES = "DNS:n1, IP:192.0.2.1"
INVITED, NODE = "system:bootstrap:abcdef", "system:node:n1"
GROUPS = {INVITED: ["system:bootstrappers"], NODE: ["system:nodes"]}
USAGES = {
    CLIENT: ["digital signature", "client auth"],
    SERVING: ["digital signature", "server auth"],
}


def by_openssl(folder, names="", subject=(GROUP, NAME), extensions="", attributes="", more=""):
    """A request, PEM. `names` are alternative names; the rest are lines of openssl's settings."""
    certificates.key(folder, "n")
    lines = [f"subjectAltName = {names}"] if names else []
    # A kind that begins with + belongs to the part before it.
    parts = "".join(f"{n}.{kind} = {value}\n" for n, (kind, value) in enumerate(subject))
    settings = f"""[req]
prompt = no
utf8 = yes
distinguished_name = who
{"req_extensions = more" if lines or extensions else ""}
{"attributes = asked" if attributes else ""}
[who]
{parts}
[more]
{chr(10).join([*lines, extensions])}
[asked]
{attributes}
{more}
"""
    (folder / "settings").write_text(settings)
    words = ["openssl", "req", "-new", "-key", "n.key", "-config", "settings"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def der(tag, *parts):
    """One value in DER: a tag, the length, what it holds."""
    content = b"".join(parts)
    if len(content) < 128:
        return bytes([tag, len(content)]) + content
    size = len(content).to_bytes(1 + (len(content) > 255), "big")
    return bytes([tag, 0x80 | len(size)]) + size + content


OID = {"extensions": bytes.fromhex("06092a864886f70d01090e"), "names": bytes.fromhex("0603551d11"),
       "O": bytes.fromhex("060355040a"), "CN": bytes.fromhex("0603550403"),
       "ecdsa": bytes.fromhex("06082a8648ce3d040302")}  # fmt: skip


def san(*names):
    """A SAN extension; a name is its tag and its bytes."""
    listed = der(0x30, *(der(0x80 | tag, value) for tag, value in names))
    return der(0x30, OID["names"], der(0x04, listed))


def extension_request(*lists):
    """The attribute that asks for extensions, with one list of them or several."""
    return der(0x30, OID["extensions"], der(0x31, *(der(0x30, *each) for each in lists)))


def by_hand(folder, *attributes, subject=None, after=b"", sign_with="n"):
    """A request, PEM, with these attributes as they are, and a signature that fits."""
    for name in {"n", sign_with}:
        certificates.key(folder, name)
    words = ["openssl", "ec", "-in", "n.key", "-pubout", "-outform", "DER"]
    public = subprocess.run(words, cwd=folder, capture_output=True, check=True).stdout
    pairs = [("O", b"system:nodes"), ("CN", b"system:node:n1")]
    if subject is None:
        subject = der(0x30, *(der(0x31, der(0x30, OID[k], der(0x0C, v))) for k, v in pairs))
    signed = der(0x30, der(0x02, b"\0"), subject, public, der(0xA0, *attributes), after)
    words = ["openssl", "dgst", "-sha256", "-sign", f"{sign_with}.key"]
    signature = subprocess.run(words, cwd=folder, input=signed, capture_output=True, check=True)
    whole = der(0x30, signed, der(0x30, OID["ecdsa"]), der(0x03, b"\0", signature.stdout))
    text = base64.encodebytes(whole).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"


OWN = ((2, b"n1"), (7, bytes([192, 0, 2, 1])))
OTHER = ((2, b"n1"), (2, b"other-node"), (7, bytes([10, 0, 0, 9])))


def spec(pem, signer=SERVING, user=NODE, **more):
    return {"request": base64.b64encode(pem.encode()).decode(), "signerName": signer,
            "username": user, "groups": GROUPS.get(user, ["system:authenticated"]),
            "usages": USAGES.get(signer, ["client auth"]), **more}  # fmt: skip


@pytest.fixture
def program(binaries, monkeypatch):
    monkeypatch.setenv("PATH", f"{binaries}/bin:/usr/bin:/bin")


def refused(asked):
    return csr_approver.refusal(asked, "n1", {"192.0.2.1", "n1"})


@pytest.mark.kube
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda d: spec(by_openssl(d), CLIENT, INVITED), id="an invited node"),
        pytest.param(lambda d: spec(by_openssl(d), CLIENT), id="a renewal"),
        pytest.param(lambda d: spec(by_openssl(d, subject=(NAME, GROUP)), CLIENT),
                     id="name and group in the other order"),
        pytest.param(lambda d: spec(by_openssl(d, OWN_NAMES)), id="its own name and address"),
        pytest.param(lambda d: spec(by_openssl(d, "IP:192.0.2.1")), id="its address alone"),
        pytest.param(lambda d: spec(by_hand(d, extension_request([san(*OWN)]))),
                     id="the same, put together by hand"),
        pytest.param(lambda d: spec(by_hand(d), CLIENT), id="a renewal put together by hand"),
    ],
)  # fmt: skip
def test_what_a_kubelet_asks_for_is_approved(program, tmp_path, make):
    assert refused(make(tmp_path)) == ""


HOSTILE = [
    ("an unknown kind of name stands before another node's",
     lambda d: spec(by_openssl(d, "otherName:1.2.3.4;UTF8:x, DNS:other-node, IP:10.0.0.9")),
     "IP:10.0.0.9"),
    ("the only foreign name is of an unknown kind",
     lambda d: spec(by_openssl(d, "DNS:n1, otherName:1.2.3.4;UTF8:x")), "otherName:"),
    ("a registered id is among the names",
     lambda d: spec(by_openssl(d, "DNS:n1, RID:1.2.3.4")), "registeredID:"),
    ("a directory name is among the names",
     lambda d: spec(by_openssl(d, "DNS:n1, dirName:who")), "directoryName:"),
    ("an email address is among the names",
     lambda d: spec(by_openssl(d, "DNS:n1, email:n1@n1")), "email:n1@n1"),
    ("a URI is among the names",
     lambda d: spec(by_openssl(d, "DNS:n1, URI:https://n1")), "URI:https://n1"),
    ("another node's name is among the names",
     lambda d: spec(by_openssl(d, "DNS:n1, DNS:other-node")), "DNS:other-node"),
    ("another node's address is among the names",
     lambda d: spec(by_openssl(d, "IP:192.0.2.1, IP:10.0.0.9")), "IP:10.0.0.9"),
    ("the API server's name is among the names",
     lambda d: spec(by_openssl(d, "DNS:kubernetes.default.svc")), "DNS:kubernetes"),
    ("a name is a wildcard", lambda d: spec(by_openssl(d, "DNS:*")), "DNS:\\*"),
    ("a name holds two, divided by a comma",
     lambda d: spec(by_hand(d, extension_request([san((2, b"n1, DNS:other-node"))]))),
     "DNS:n1, DNS:other-node"),
    ("a name goes on behind a zero byte",
     lambda d: spec(by_hand(d, extension_request([san((2, b"n1\0other-node"))]))), "DNS:n1\0"),
    ("a name is not ASCII",
     lambda d: spec(by_hand(d, extension_request([san((2, b"n1\xff"))]))), "malformed"),
    ("an IPv6 address holds the node's own of version 4",
     lambda d: spec(by_openssl(d, "IP:::ffff:192.0.2.1")), "IP:::ffff:192.0.2.1"),
    ("an address has five bytes",
     lambda d: spec(by_hand(d, extension_request([san((7, bytes([192, 0, 2, 1, 9])))]))),
     "IP address"),
    ("a name is of a kind that there is not",
     lambda d: spec(by_hand(d, extension_request([san(*OWN, (10, b"x"))]))), "tag 10"),
    ("a second extension has further names",
     lambda d: spec(by_hand(d, extension_request([san(*OWN), san(*OTHER)]))), "duplicate"),
    ("a second attribute has further extensions",
     lambda d: spec(by_hand(d, extension_request([san(*OWN)]), extension_request([san(*OTHER)]))),
     "duplicate|attributes and extensions"),
    ("the attribute has a second list of extensions",
     lambda d: spec(by_hand(d, extension_request([san(*OWN)], [san(*OTHER)]))), "2 values"),
    ("the attribute has no list of extensions",
     lambda d: spec(by_hand(d, extension_request())), "0 values"),
    ("something follows the attributes",
     lambda d: spec(by_hand(d, extension_request([san(*OWN)]), after=der(0x04, b"x"))),
     "holds more"),
    ("the certificate is to be an authority's",
     lambda d: spec(by_openssl(d, OWN_NAMES, extensions="basicConstraints = critical,CA:TRUE")),
     "2.5.29.19"),
    ("the certificate is to have a use of its own choice",
     lambda d: spec(by_openssl(d, OWN_NAMES, extensions="extendedKeyUsage = clientAuth")),
     "2.5.29.37"),
    ("an extension is unknown",
     lambda d: spec(by_openssl(d, OWN_NAMES, extensions="1.2.3.4 = ASN1:UTF8:x")), "1.2.3.4"),
    ("there is a challenge password",
     lambda d: spec(by_openssl(d, OWN_NAMES, attributes="challengePassword = secret")),
     "1.2.840.113549.1.9.7"),
    ("there is an attribute without extensions, for a client",
     lambda d: spec(by_openssl(d, attributes="unstructuredName = x"), CLIENT),
     "1.2.840.113549.1.9.2"),
    ("names are asked for, for a client",
     lambda d: spec(by_openssl(d, OWN_NAMES), CLIENT, INVITED), "2.5.29.17"),
    ("no name is asked for, for a server", lambda d: spec(by_openssl(d)), "none"),
    ("the list of names is empty",
     lambda d: spec(by_hand(d, extension_request([san()]))), "no name"),
    ("it is for another node's name",
     lambda d: spec(by_openssl(d, subject=(GROUP, ("CN", "system:node:n2"))), CLIENT, INVITED),
     "CN=system:node:n2"),
    ("another node renews it",
     lambda d: spec(by_openssl(d), CLIENT, "system:node:n2", groups=["system:nodes"]),
     "system:node:n2 may not"),
    ("it is for an administrator",
     lambda d: spec(by_openssl(d, subject=(("O", "system:masters"), ("CN", "x"))), CLIENT, INVITED),
     "system:masters"),
    ("it is for a further group",
     lambda d: spec(by_openssl(d, subject=(GROUP, ("O", "system:masters"), NAME)), CLIENT, INVITED),
     "system:masters"),
    ("a further group is in the same part of the subject",
     lambda d: spec(by_openssl(d, subject=(GROUP, ("+O", "system:masters"), NAME)), CLIENT),
     r"O=system:nodes\+O=system:masters|O=system:masters\+O=system:nodes"),
    ("it has two common names",
     lambda d: spec(by_openssl(d, subject=(GROUP, ("CN", "admin"), NAME)), CLIENT), "CN=admin"),
    ("the group is there twice",
     lambda d: spec(by_openssl(d, subject=(GROUP, GROUP, NAME)), CLIENT), "may not be"),
    ("the group hides in the common name",
     lambda d: spec(by_openssl(d, subject=(("CN", "system:node:n1,O=system:nodes"),)), CLIENT),
     "may not be"),
    ("there is a unit besides the group",
     lambda d: spec(by_openssl(d, subject=(GROUP, ("OU", "x"), NAME)), CLIENT), "2.5.4.11=x"),
    ("the group is no text",
     lambda d: spec(by_hand(d, subject=der(0x30, der(0x31, der(0x30, OID["O"], der(2, b"\1"))))),
                    CLIENT), "no text"),
    ("the subject is empty", lambda d: spec(by_hand(d, subject=der(0x30)), CLIENT), "may not be"),
    ("it is signed with another key",
     lambda d: spec(by_hand(d, extension_request([san(*OWN)]), sign_with="other")), "verification"),
    ("a second request follows the first",
     lambda d: spec(by_openssl(d, OWN_NAMES) + by_openssl(d, "DNS:other-node")), "one PEM block"),
    ("text stands before the request",
     lambda d: spec("x\n" + by_openssl(d, OWN_NAMES)), "one PEM block"),
    ("it is no request", lambda d: spec("nothing"), "one PEM block"),
    ("it is for another signer",
     lambda d: spec(by_openssl(d), "kubernetes.io/kube-apiserver-client"), "not a request of a n"),
    ("the asking user is no node",
     lambda d: spec(by_openssl(d, "DNS:n1"), SERVING, "n1"), "n1 is no node"),
    ("the asking user has a node's name, but is none",
     lambda d: spec(by_openssl(d, OWN_NAMES), groups=["system:authenticated"]), "is no node"),
    ("somebody who is only invited asks for a server's",
     lambda d: spec(by_openssl(d, OWN_NAMES), SERVING, INVITED), "is no node"),
    ("a server's certificate is to be good for clients",
     lambda d: spec(by_openssl(d, OWN_NAMES), usages=["server auth", "client auth"]),
     "client auth"),
    ("a client's certificate is to sign others",
     lambda d: spec(by_openssl(d), CLIENT, usages=["client auth", "cert sign"]), "cert sign"),
]  # fmt: skip


@pytest.mark.kube
@pytest.mark.parametrize(
    ("make", "says"), [pytest.param(make, says, id=what) for what, make, says in HOSTILE]
)
def test_a_request_is_refused_if(program, tmp_path, make, says):
    why = refused(make(tmp_path))
    assert why
    assert re.search(says, why), why


@pytest.mark.kube
def test_a_token_that_was_revoked_gets_nothing(program, tmp_path):
    asked = spec(by_openssl(tmp_path), CLIENT, INVITED)
    assert csr_approver.refusal(asked, "n1", set()) == ""
    assert csr_approver.refusal(asked, "", set()) == f"{INVITED} is not invited, or no longer"


@pytest.mark.unit
@pytest.mark.parametrize("script", ["", "#!/bin/sh\nkill -9 $$\n"], ids=["is missing", "dies"])
def test_nothing_is_approved_where_the_program_that_reads_requests(tmp_path, monkeypatch, script):
    if script:
        (tmp_path / csr_approver.READER).write_text(script)
        (tmp_path / csr_approver.READER).chmod(0o755)
    pem = by_openssl(tmp_path, OWN_NAMES)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkFailed, match=r"describe-request.* no.* approved"):
        refused(spec(pem))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("user", "status", "used"),
    [(INVITED, {"certificate": "PEM"}, True), (INVITED, {}, False),
     ("system:bootstrap:123456", {"certificate": "PEM"}, False)],
)  # fmt: skip
def test_an_invitation_was_used_once_its_node_has_a_certificate(user, status, used):
    """Which is known at once; the API server remembers for 10 s that the token was good."""

    class Answers:
        def call(self, method, path):
            assert path.startswith(api_client.REQUESTS)
            return {"items": [{"spec": {"username": user}, "status": status}]}

    assert csr_approver.used(Answers(), "abcdef.0123456789abcdef") is used


@pytest.mark.unit
def test_an_invitation_is_given_once_the_server_knows_it():
    """A real one hears of it within milliseconds, if it is not busy."""
    answers = [api_client.Refused(401, "no"), api_client.Refused(403, "no"), {"items": []}]

    class Guest:
        def call(self, method, path):
            if isinstance(answers[0], Exception):
                raise answers.pop(0)
            return answers.pop(0)

    csr_approver.await_known(Guest(), "abcdef.0123456789abcdef")
    assert not answers


@pytest.mark.unit
def test_whoever_is_invited_may_ask_at_once():
    """A built-in role is there a second later, and a kubelet that is refused waits for two."""
    made = []

    class Notes:
        def make(self, path, thing):
            made.append((path, thing))

    csr_approver.accept(Notes())
    names = [(path, thing["metadata"]["name"]) for path, thing in made]
    at = names.index((api_client.BINDINGS, api_client.JOIN))
    assert (api_client.ROLES, made[at][1]["roleRef"]["name"]) in names[:at]


@pytest.mark.kube
def test_a_node_joins_before_the_controller_manager_begins(any_machine):
    """It waits until the API server calls itself healthy; who signs for nodes does not.

    Nor who refuses them, as one that comes by another's invitation.
    """
    machine = any_machine
    made = machine.up("--name", "one")
    invitation = machine.folder / "join.json"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    changed = {**json.loads(invitation.read_text()), "node": "127.77.200.201"}
    another = machine.folder / "another.json"
    another.write_text(json.dumps(changed))
    os.chown(another, invitation.stat().st_uid, -1)
    (manager,) = machine.pids(made, "kube-controller-manager")
    os.kill(manager, signal.SIGSTOP)
    try:
        refused = subprocess.run(
            machine.words("join", str(another)), env=machine.environment,
            capture_output=True, text=True,
        )  # fmt: skip
        worker = json.loads(machine.verb("join", "--json", str(invitation)).stdout)
    finally:
        os.kill(manager, signal.SIGCONT)
    assert refused.returncode == 1
    assert "the cluster refuses the node: system:bootstrap:" in refused.stderr
    folder = Path(worker["folder"])
    assert not (folder.parent / changed["node"]).exists()
    log = (folder / "log/kubelet").read_text()
    assert "Unauthorized" not in log, "it has its certificates from its first question on"
    asked = {one["spec"]["username"].rpartition(":")[0]: one["spec"]["signerName"]
             for one in machine.get(made, "csr")["items"]
             if one["status"].get("certificate")}  # fmt: skip
    assert asked == {"system:bootstrap": CLIENT, "system:node": SERVING}
    assert len(list((folder / "kubelet/pki").glob("*-20*.pem"))) == 2, "and asks for none"


@pytest.mark.kube
def test_a_node_gets_no_certificate_for_another_from_a_real_api_server(any_machine, tmp_path):
    machine = any_machine
    made = machine.up("--name", "one")
    invitation = machine.folder / "join.json"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    worker = json.loads(machine.verb("join", "--json", str(invitation)).stdout)
    folder, node, other = Path(worker["folder"]), worker["node"], made["node"]
    own = folder / "kubelet/pki/kubelet-client-current.pem"
    client = api_client.Client(made["server"], (folder / "ca.crt").read_text(), own)
    name = ("CN", f"system:node:{node}")
    assert record(worker)["address"] == node, "on loopback a node is named by its address"

    def ask(signer, pem):
        """Post a request as the node; its final conditions, and whether it was issued."""
        content = spec(pem, signer)
        sent = {name: content[name] for name in ("request", "signerName", "usages")}
        body = {"metadata": {"generateName": "asked-"}, "spec": sent}
        try:
            made = client.call("POST", api_client.REQUESTS, body)
        except api_client.Refused as error:  # by the API server's own admission
            return {f"Refused with {error.status}": str(error)}, None
        path = f"{api_client.REQUESTS}/{made['metadata']['name']}"

        def decided():
            status = client.call("GET", path)["status"]
            kinds = {entry["type"] for entry in status.get("conditions", [])}
            return status if "certificate" in status or kinds - {"Approved"} else None

        status = eventually(decided)
        kinds = {entry["type"]: entry["message"] for entry in status["conditions"]}
        return kinds, status.get("certificate")

    kinds, issued = ask(SERVING, by_openssl(tmp_path, f"IP:{node}", (GROUP, name)))
    assert set(kinds) == {"Approved"}
    assert issued, "its own is issued, so that the path to the signer is there"
    mine, seen = (GROUP, name), {}
    for what, signer, pem in [
        ("another's address", SERVING, by_openssl(tmp_path, f"IP:{node}, IP:{other}", mine)),
        ("another's name", SERVING, by_openssl(tmp_path, f"IP:{node}, DNS:{other}", mine)),
        ("names of an unknown kind before another's", SERVING,
         by_openssl(tmp_path, f"otherName:1.2.3.4;UTF8:x, DNS:other-node, IP:{other}", mine)),
        ("a name of an unknown kind", SERVING,
         by_openssl(tmp_path, f"IP:{node}, otherName:1.2.3.4;UTF8:x", mine)),
        ("two extensions", SERVING,
         by_openssl(tmp_path, f"IP:{node}", mine, extensions="extendedKeyUsage = clientAuth")),
        ("another's identity", CLIENT,
         by_openssl(tmp_path, subject=(GROUP, ("CN", f"system:node:{other}")))),
        ("a further group", CLIENT,
         by_openssl(tmp_path, subject=(GROUP, ("O", "system:masters"), name))),
        ("an administrator's group", CLIENT,
         by_openssl(tmp_path, subject=(("O", "system:masters"), name))),
    ]:  # fmt: skip
        kinds, issued = ask(signer, pem)
        assert set(kinds) in ({"Denied"}, {"Refused with 403"}), (what, kinds)
        seen[what] = kinds
        assert issued is None, what
    ours = [what for what, kinds in seen.items() if "Denied" in kinds]
    assert len(ours) >= 5, (seen, "the API server itself looks at clients' certificates alone")
