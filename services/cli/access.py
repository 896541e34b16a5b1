"""How a coordinator is reached: in plain text or by TLS, with a token or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from services.common.rpc.addresses import is_loopback
from services.common.rpc.settings import missing_of_pair
from services.common.rpc.tls import ClientFiles, ClientTls
from services.common.specdec.errors import StartupError

F = TypeVar("F", bound=Callable[..., Any])
_FIELDS = ("tls_ca", "tls_cert", "tls_key", "tls_name", "insecure")


@dataclass(frozen=True)
class Access:
    """Means of access.

    Attributes:
        tls: Certificates; None for plain text.
    """

    tls: ClientTls | None = None


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
    ca, cert, key, name, insecure = (fields.pop(field) for field in _FIELDS)
    if fault := missing_of_pair(cert, key, ("--tls-cert", "--tls-key")):
        raise click.UsageError(fault)
    for flag, value in (("--tls-cert", cert), ("--tls-name", name)):
        if value and not ca:
            raise click.UsageError(f"{flag} is {value}: needs --tls-ca, who signed the coordinator's certificate")
    if not (ca or insecure or is_loopback(address)):
        raise click.UsageError(
            f"--address is {address}, on another machine: needs --tls-ca, or --insecure for plain text"
        )
    try:
        return Access(ClientTls(ClientFiles(ca, cert, key, name)) if ca else None)
    except StartupError as error:
        raise click.ClickException(str(error)) from None


def _file(name: str, help_text: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        default="",
        metavar="FILE",
        envvar=f"PACELINE_{name.replace('-', '_').upper()}",
        show_envvar=True,
        help=f"PEM file. {help_text}",
    )
