"""Certificates with a given time left."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding


def write_certificate(file: Path, days: float) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    begin, end = now - timedelta(days=100), now + timedelta(days=days)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
