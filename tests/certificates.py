"""Certificates for tests: authorities, and what they sign for a server on loopback or for a client."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path

    def replace_with(self, other: "Pair") -> None:
        """Rotation: the key first, so that for a moment the two do not belong together."""
        for mine, new in ((self.key, other.key), (self.cert, other.cert)):
            partial = mine.with_suffix(".partial")
            partial.write_bytes(new.read_bytes())
            partial.replace(mine)


class Authority:
    """A certificate authority whose files lie in one directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.ca = directory / f"{name}.pem"
        builder = _begun(self._name, self._name, self._key, timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.ca.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, name: str = "server", *, expires_in: timedelta = timedelta(hours=1)) -> Pair:
        """Good for a server at 127.0.0.1 or localhost, and for a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _begun(_named(name), self._name, key, expires_in)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        pair = Pair(cert=self._directory / f"{name}.pem", key=self._directory / f"{name}.key")
        pair.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.write_bytes(_pem(key))
        return pair

    def server(self, pair: Pair | None = None, *, client_ca: Path | None = None) -> TlsFiles:
        """What a server is started with."""
        pair = pair or self.issue()
        return TlsFiles(cert=pair.cert, key=pair.key, client_ca=client_ca)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, expires_in: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + expires_in)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(made: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(made, x509.Certificate):
        return made.public_bytes(serialization.Encoding.PEM)
    return made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
