"""Certificates with a given time left."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key


def write_certificate(file: Path, days: float) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    begin, end = now - timedelta(days=100), now + timedelta(days=days)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def valid_until(days: float, file: Path, keys: Path) -> Path:
    """A copy of the SuperLink's certificate with another end, signed by the same authority."""
    old = x509.load_pem_x509_certificate((keys / "superlink" / "server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    now = datetime.now(UTC)
    new = x509.CertificateBuilder(
        authority.subject, old.subject, old.public_key(), x509.random_serial_number(),
        now - timedelta(days=90), now + timedelta(days=days), list(old.extensions),
    )  # fmt: skip
    signer = load_pem_private_key((keys / "ca" / "ca.key").read_bytes(), None)
    file.write_bytes(new.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    return file
