"""The cluster's certificates and kubeconfigs, signed by an authority of its own."""

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kube_paths import (
    API_SERVER,
    API_SERVICE,
    CERTIFICATES,
    CONTROL_PLANE_ADDRESS,
    node_address,
    node_name,
)

AUTHORITY = "authority"
SERVICE_ACCOUNTS = CERTIFICATES / "service-accounts.key"
VALID_DAYS = 365
CLIENTS = {  # name of the files: groups and user
    "admin": ("system:masters", "admin"),
    "controller-manager": (None, "system:kube-controller-manager"),
    "scheduler": (None, "system:kube-scheduler"),
    "proxy": (None, "system:kube-proxy"),
}


def create_certificates() -> None:
    """Create what the control plane needs."""
    CERTIFICATES.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not certificate_file(AUTHORITY).exists():
        _create_authority()
    if not SERVICE_ACCOUNTS.exists():
        _write_key(SERVICE_ACCOUNTS, ec.generate_private_key(ec.SECP256R1()))
    names = [
        *("kubernetes", "kubernetes.default", "kubernetes.default.svc"),
        "kubernetes.default.svc.cluster.local",
    ]
    _issue(
        "api-server",
        None,
        "kube-apiserver",
        names,
        [CONTROL_PLANE_ADDRESS, API_SERVICE, "127.0.0.1"],
    )
    for name, (group, user) in CLIENTS.items():
        _issue(name, group, user)
        _write_kubeconfig(name)


def create_node_certificate(number: int) -> None:
    """Create the certificate and the kubeconfig of a node's kubelet."""
    name = node_name(number)
    _issue(name, "system:nodes", f"system:node:{name}", [name], [node_address(number)])
    _write_kubeconfig(name)


def certificate_file(name: str) -> Path:
    """The file of a certificate."""
    return CERTIFICATES / f"{name}.crt"


def key_file(name: str) -> Path:
    """The file of a certificate's private key."""
    return CERTIFICATES / f"{name}.key"


def config_file(name: str) -> Path:
    """The kubeconfig of a client."""
    return CERTIFICATES / f"{name}.conf"


def _create_authority() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject(None, "tramontane-kubernetes")
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_file(AUTHORITY), key)
    _write(certificate_file(AUTHORITY), certificate.public_bytes(serialization.Encoding.PEM))


def _issue(
    name: str,
    group: str | None,
    user: str,
    names: list[str] | None = None,
    addresses: list[str] | None = None,
) -> None:
    """Create a certificate of a client, and of a server where it has names or addresses."""
    if certificate_file(name).exists():
        return
    signer = x509.load_pem_x509_certificate(certificate_file(AUTHORITY).read_bytes())
    signing_key = serialization.load_pem_private_key(key_file(AUTHORITY).read_bytes(), None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    builder = (
        _builder(_subject(group, user), signer.subject, key)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
    )
    alternatives: list[x509.GeneralName] = [x509.DNSName(text) for text in names or []]
    alternatives += [x509.IPAddress(ipaddress.ip_address(text)) for text in addresses or []]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    certificate = builder.sign(signing_key, hashes.SHA256())
    _write_key(key_file(name), key)
    _write(certificate_file(name), certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _subject(group: str | None, user: str) -> x509.Name:
    groups = [] if group is None else [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.TraditionalOpenSSL  # of which the API server takes keys
    encoding, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    _write(path, key.private_bytes(encoding, form, encryption))


def _write(path: Path, content: bytes) -> None:
    """Write a file that exists as a whole or not at all, readable by its owner only."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(content)
    unfinished.rename(path)


def _write_kubeconfig(name: str) -> None:
    def encode(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    cluster = {
        "server": API_SERVER,
        "certificate-authority-data": encode(certificate_file(AUTHORITY)),
    }
    user = {
        "client-certificate-data": encode(certificate_file(name)),
        "client-key-data": encode(key_file(name)),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": name}}],
        "current-context": "context",
    }
    if not config_file(name).exists():
        _write(config_file(name), json.dumps(config, indent=1).encode())
