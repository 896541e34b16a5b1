"""How a coordinator is reached: in plain text or by TLS, with a token or without."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from services.common.rpc.addresses import is_loopback
from services.common.rpc.settings import missing_of_pair
from services.common.rpc.tls import ClientFiles, ClientTls
from services.common.rpc.tokens import fault_of
from services.common.specdec.errors import StartupError

F = TypeVar("F", bound=Callable[..., Any])
_FIELDS = ("tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "insecure")


@dataclass(frozen=True)
class Access:
    """Means of access.

    Attributes:
        tls: Certificates; None for plain text.
        token: Bearer token; empty for none.
    """

    tls: ClientTls | None = None
    token: str = field(default="", repr=False)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What every call says of who calls."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []


PLAIN = Access()


def access_options(command: F) -> F:
    """Add the options that `access_to` takes to a command."""
    for option in reversed(
        (
            _file("tls-ca", "TLS: certificates of those who may have signed the coordinator's."),
            _file("tls-cert", "Certificate to show, with its chain, where the coordinator asks for one."),
            _file("tls-key", "Key of --tls-cert."),
            click.option(
                "--tls-name",
                default="",
                metavar="NAME",
                help="Name that its certificate has to have.  [default: the one in --address]",
            ),
            click.option(
                "--token-file",
                default="",
                metavar="FILE",
                envvar="PACELINE_TOKEN_FILE",
                show_envvar=True,
                help="Bearer token to send; PACELINE_TOKEN is one itself.",
            ),
            click.option("--insecure", is_flag=True, help="Plain text though --address is not this machine."),
        )
    ):
        command = option(command)
    return command


def access_to(address: str, fields: dict[str, Any]) -> Access:
    """Take the options of `access_options` out of `fields` and return what they say.

    Raises:
        click.UsageError: They do not go together, or plain text would leave this machine unasked.
        click.ClickException: A file cannot be used.
    """
    ca, cert, key, name, token_file, insecure = (fields.pop(field) for field in _FIELDS)
    if fault := missing_of_pair(cert, key, ("--tls-cert", "--tls-key")):
        raise click.UsageError(fault)
    for flag, value in (("--tls-cert", cert), ("--tls-name", name)):
        if value and not ca:
            raise click.UsageError(f"{flag} is {value}: needs --tls-ca, who signed the coordinator's certificate")
    if not (ca or insecure or is_loopback(address)):
        raise click.UsageError(
            f"--address is {address}, on another machine: needs --tls-ca, or --insecure for plain text"
        )
    token = _token(token_file)
    try:
        return Access(ClientTls(ClientFiles(ca, cert, key, name)) if ca else None, token)
    except StartupError as error:
        raise click.ClickException(str(error)) from None


def _token(path: str) -> str:
    """Return the token of a file, or of the environment; empty where there is none."""
    named = f"--token-file {path}" if path else "PACELINE_TOKEN"
    try:
        token = Path(path).read_text(encoding="ascii", errors="replace") if path else os.environ.get(named, "")
    except OSError as error:
        raise click.ClickException(f"{named} cannot be read: {error.strerror}") from None
    token = token.strip()
    if (path or token) and (fault := fault_of(token)):
        raise click.ClickException(f"{named}: {fault}")
    return token


def _file(name: str, help_text: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        default="",
        metavar="FILE",
        envvar=f"PACELINE_{name.replace('-', '_').upper()}",
        show_envvar=True,
        help=f"PEM file. {help_text}",
    )
