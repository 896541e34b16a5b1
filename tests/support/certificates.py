"""Real certificates: an authority and what it signs.

authority = Authority(folder)
pair = authority.issue("target", dns=["target-worker"])
settings = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.cert}
authority.issue("target", dns=["target-worker"])    # a new certificate in the same files
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: str
    key: str

    @property
    def as_server(self) -> dict[str, str]:
        """Settings of a server that shows it."""
        return {"tls_cert": self.cert, "tls_key": self.key}


class Authority:
    """Signs certificates.

    Attributes:
        cert: File of its own.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made = self._builder(self._name, self._key, _DAY).add_extension(constraints, critical=True)
        self.cert = str(folder / f"{name}.crt")
        Path(self.cert).write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        dns: Sequence[str] = (),
        uris: Sequence[str] = (),
        loopback: bool = True,
        days: float = 1,
        pass_phrase: bytes = b"",
    ) -> Pair:
        """Write NAME.crt and NAME.key, in place of what is there.

        Args:
            name: Of the files.
            dns: Names in it.
            uris: The same.
            loopback: Whether 127.0.0.1 is among its names.
            days: How long it is valid from now on; negative: how long it is no longer.
            pass_phrase: Of the key; empty for none.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in dns]
        names += [x509.UniformResourceIdentifier(each) for each in uris]
        names += [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if loopback else []
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key, days * _DAY)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = Pair(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))
        locked = BestAvailableEncryption(pass_phrase) if pass_phrase else NoEncryption()
        Path(pair.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
        Path(pair.cert).write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        end = datetime.datetime.now(datetime.UTC) + valid
        return (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(min(end, datetime.datetime.now(datetime.UTC)) - 2 * _DAY)
            .not_valid_after(end)
        )
