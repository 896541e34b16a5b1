"""TLS from files: what a server shows and asks for, what a client shows and believes. See ADR 18.

Certificates are checked before gRPC gets them: of a key that is not the certificate's it says nothing until a handshake
fails.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from services.common.rpc.reloaded import LOOK_EVERY_S, Reloaded, UnusableFilesError


class ServerFiles(Protocol):
    """Where a server's certificates are; empty for none."""

    @property
    def tls_cert(self) -> str:
        """What it shows."""

    @property
    def tls_key(self) -> str:
        """The key of that."""

    @property
    def tls_ca(self) -> str:
        """Who may have signed its callers' certificates; empty asks for none."""


def server_credentials(files: ServerFiles, look_every_s: float = LOOK_EVERY_S) -> grpc.ServerCredentials | None:
    """Return a server's credentials, which follow the files; None for plain text.

    Raises:
        StartupError: The files cannot be read or used.
    """
    if not files.tls_cert:
        return None
    paths = [files.tls_cert, files.tls_key, *([files.tls_ca] if files.tls_ca else [])]

    def make(contents: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        chain, key, *ca = contents
        _check_pair(chain, key, f"--tls-cert {files.tls_cert} and --tls-key {files.tls_key}")
        if ca:
            _check_authorities(ca[0], f"--tls-ca {files.tls_ca}")
        return grpc.ssl_server_certificate_configuration([(key, chain)], ca[0] if ca else None)

    configuration = Reloaded(paths, make, look_every_s)
    used = configuration.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Asked at every handshake; None says that the last one is still right.
        nonlocal used
        before, used = used, configuration.current()
        return None if used is before else used

    require = bool(files.tls_ca)
    return grpc.dynamic_ssl_server_credentials(used, changed, require)  # type: ignore[arg-type]  # None is allowed


@dataclass(frozen=True)
class ClientFiles:
    """Where a client's certificates are.

    Attributes:
        ca: Who may have signed the server's certificate.
        cert: What the client shows; empty for nothing.
        key: The key of that.
        server_name: Name that the server's certificate has to have; empty for the one in its address.
        flags: How the settings of the first three are called, for messages.
    """

    ca: str
    cert: str = ""
    key: str = ""
    server_name: str = ""
    flags: tuple[str, str, str] = ("--tls-ca", "--tls-cert", "--tls-key")


class ClientTls:
    """A client's credentials, which follow the files.

    Channels that are to share connections share one of these: gRPC compares credentials by identity.
    """

    def __init__(self, files: ClientFiles, look_every_s: float = LOOK_EVERY_S) -> None:
        """Read the files.

        Raises:
            StartupError: They cannot be read or used.
        """
        self._files = files
        paths = [files.ca, *([files.cert, files.key] if files.cert else [])]
        self._credentials = Reloaded(paths, self._make, look_every_s)

    @property
    def server_name(self) -> str:
        """Name that the server's certificate has to have; empty for the one in its address."""
        return self._files.server_name

    def current(self) -> grpc.ChannelCredentials:
        """Return the credentials: the same object until the files change."""
        return self._credentials.current()

    def _make(self, contents: Sequence[bytes]) -> grpc.ChannelCredentials:
        files = self._files
        ca, *pair = contents
        ca_flag, cert_flag, key_flag = files.flags
        _check_authorities(ca, f"{ca_flag} {files.ca}")
        if not pair:
            return grpc.ssl_channel_credentials(ca)
        chain, key = pair
        _check_pair(chain, key, f"{cert_flag} {files.cert} and {key_flag} {files.key}")
        return grpc.ssl_channel_credentials(ca, key, chain)


def _check_pair(chain: bytes, key: bytes, named: str) -> None:
    # OpenSSL takes these from files only. This one has no name and is gone with its descriptor.
    descriptor = os.memfd_create("pair")
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n" + chain)
        file.flush()
        # Without an answer it would ask whoever sits at the terminal for a pass phrase.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _checked(lambda: context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=""), named)


def _check_authorities(ca: bytes, named: str) -> None:
    def load() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=ca.decode("ascii"))
        if not context.cert_store_stats()["x509"]:
            raise ssl.SSLError("there is no certificate in it")

    _checked(load, named)


def _checked(load: Callable[[], None], named: str) -> None:
    try:
        load()
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "reason", None) or ("not PEM" if isinstance(error, UnicodeDecodeError) else error)
        raise UnusableFilesError(f"{named}: cannot be used: {reason}") from None
