"""Settings: a pydantic model is the single description; each field is a flag and an environment variable.

`PACELINE_TARGET_MAX_SESSIONS=4` and `--max-sessions 4` are the same setting; the flag wins. `--help` lists both.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

import click
import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.rpc.addresses import is_loopback
from services.common.rpc.logs import LogFormat

T = TypeVar("T", bound="Settings")


class Settings(BaseModel):
    """Base of every service's settings. Units are in the names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    env_prefix: ClassVar[str] = "PACELINE_"

    @classmethod
    def env_name(cls, field: str) -> str:
        """Return the environment variable of a field."""
        return cls.env_prefix + field.upper()

    @classmethod
    def flag_name(cls, field: str) -> str:
        """Return the command-line flag of a field."""
        return "--" + field.replace("_", "-")


class ServerSettings(Settings):
    """What every gRPC server here has to be told."""

    listen: str = Field("127.0.0.1:0", description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    health_listen: str = Field(
        "", description="Address of a port for probes: health only, in plain text, alive and ready; empty: none."
    )
    metrics_listen: str = Field("", description="Address of a page of metrics for Prometheus, /metrics; empty: none.")
    tls_cert: str = Field(
        "", description="PEM file: the certificate that callers are shown, with its chain; read anew when it changes."
    )
    tls_key: str = Field("", description="PEM file: the key of --tls-cert.")
    tls_ca: str = Field(
        "", description="PEM file: ask callers for a certificate that one of these has signed; empty asks for none."
    )
    tls_clients: str = Field(
        "", description="NAME,NAME: of those, let only these in, by DNS name or URI in the certificate; empty lets all."
    )
    insecure: bool = Field(
        False, description="Plain text on links without TLS though they leave this machine; else that is refused."
    )
    max_message_mib: int = Field(64, ge=4, le=1024, description="Largest message, sent or received, in MiB.")
    shutdown_grace_s: float = Field(30.0, ge=0, description="After SIGTERM, running streams may go on this long.")
    drain_s: float = Field(
        0.0, ge=0, description="After SIGTERM, go on accepting calls this long, so that balancers can turn away first."
    )
    keepalive_s: float = Field(10.0, ge=1, description="Ping a silent peer this often; it is lost after one more.")
    max_connection_age_s: float = Field(
        0.0, ge=0, description="Close connections of this age to new calls, so that new pods are found; 0 never."
    )
    worker_id: str = Field("", description="Name in logs and traces; default HOSTNAME-PID.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")
    log_content: bool = Field(
        False, description="Prompts and answers may be in the log; else no line, span or error has anything of them."
    )
    log_format: LogFormat = Field("console", description="Lines of the log: text for people, or JSON objects.")

    @property
    def allowed_callers(self) -> tuple[str, ...]:
        """The names of `tls_clients`."""
        return tuple(name.strip() for name in self.tls_clients.split(",") if name.strip())

    @model_validator(mode="after")
    def _links_are_safe(self) -> Self:
        if fault := missing_of_pair(self.tls_cert, self.tls_key, ("--tls-cert", "--tls-key")):
            raise ValueError(fault)
        if self.tls_ca and not self.tls_cert:
            raise ValueError(f"--tls-ca is {self.tls_ca}: needs --tls-cert and --tls-key too")
        if self.tls_clients and not self.tls_ca:
            raise ValueError(f"--tls-clients is {self.tls_clients}: needs --tls-ca, who signed their certificates")
        if self.tls_clients and not self.allowed_callers:
            raise ValueError(f"--tls-clients is {self.tls_clients!r}: has no name in it")
        if not (self.tls_cert or self.insecure or is_loopback(self.listen)):
            raise ValueError(
                f"--listen is {self.listen}, which others reach: needs --tls-cert and --tls-key,"
                " or --insecure for plain text"
            )
        return self


class ModelSettings(ServerSettings):
    """What a worker that runs a model has to be told."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Precision of weights and passes; auto is bfloat16 where the device is good at it."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
    device_map: str | None = Field(None, description="Spread a model over devices, as in transformers: auto, balanced.")
    threads: int | None = Field(None, ge=1, description="CPU threads of a forward pass; unset leaves torch's choice.")
    kv_cache_memory: str = Field(
        "25%",
        pattern=r"^\s*\d+(\.\d+)?\s*(%|[kKmMgG]i?[bB])?\s*$",
        description="Of the KV cache of all sessions: 2GiB, or a share of what is free once the model is loaded.",
    )
    max_sessions: int = Field(64, ge=1, description="Sessions served at once, each with its part of the KV cache.")
    max_waiting_sessions: int = Field(64, ge=0, description="Sessions that may wait for room; more are refused.")
    session_wait_s: float = Field(10.0, gt=0, description="A session that waits longer than this is refused.")
    max_streams: int = Field(
        1024, ge=1, description="Streams open at once, those that are idle and have no session too; more are refused."
    )
    idle_timeout_s: float = Field(
        60.0,
        gt=0,
        description="A session that is asked nothing for this long gives its cache back, and prefills again.",
    )
    prefill_chunk_tokens: int = Field(
        256,
        ge=1,
        description="Prompt tokens fed in one pass, of all sessions together; it delays the others this much.",
    )
    max_pass_tokens: int = Field(1024, ge=1, description="Tokens fed in one pass in all.")
    prefix_reuse: bool = Field(
        True, description="A prompt that begins as another did, running or ended, gets a copy of its keys and values."
    )
    gather: bool = Field(
        True,
        description="A pass waits for sessions that are about to come back, where that takes less than one more pass.",
    )
    compile: bool = Field(
        False, description="Compile small passes: needs a C++ compiler, and at the first start a minute or so."
    )

    @model_validator(mode="after")
    def _chunk_fits_in_pass(self) -> Self:
        if self.prefill_chunk_tokens > self.max_pass_tokens:
            raise ValueError(
                f"--prefill-chunk-tokens is {self.prefill_chunk_tokens}: must be at most --max-pass-tokens,"
                f" {self.max_pass_tokens}"
            )
        return self


def missing_of_pair(cert: str, key: str, flags: tuple[str, str]) -> str | None:
    """Return what is wrong with the settings of a certificate and its key, if anything is."""
    if bool(cert) == bool(key):
        return None
    given, lacking = flags if cert else reversed(flags)
    return f"{given} is {cert or key}: needs {lacking} too"


def command(settings: type[T], **attributes: Any) -> Callable[[Callable[[T], None]], click.Command]:
    """Turn a function of settings into a click command with one option for each field.

    Args:
        settings: The description.
        attributes: Passed to `click.command`.
    """

    def decorate(run: Callable[[T], None]) -> click.Command:
        def callback(**values: Any) -> None:
            run(parse(settings, {name: value for name, value in values.items() if value is not None}))

        attributes.setdefault("help", run.__doc__)
        attributes.setdefault("context_settings", {"max_content_width": 110})
        return click.Command(callback=callback, params=options(settings), **attributes)

    return decorate


def options(settings: type[Settings]) -> list[click.Parameter]:
    """Return one click option for each field, with its environment variable and default in the help."""
    made: list[click.Parameter] = []
    for name, field in settings.model_fields.items():
        kind, multiple = _click_type(field.annotation)
        flag = settings.flag_name(name)
        default = field.get_default(call_default_factory=True)
        made.append(
            click.Option(
                [f"{flag}/--no-{flag[2:]}" if kind is bool else flag],
                type=kind,
                multiple=multiple,
                default=None if multiple or field.is_required() else default,
                envvar=settings.env_name(name),
                show_envvar=True,
                show_default=default not in (None, "", ()),
                required=field.is_required(),
                help=field.description,
            )
        )
    return made


def parse(settings: type[T], values: dict[str, Any]) -> T:
    """Build settings from flags and environment.

    Raises:
        click.UsageError: Names each wrong setting, its value and its limit.
    """
    try:
        return settings(**{name: value for name, value in values.items() if value != ()})
    except pydantic.ValidationError as error:
        raise click.UsageError("\n".join(_told(settings, dict(e)) for e in error.errors())) from None


def _click_type(annotation: Any) -> tuple[Any, bool]:
    """Return click's type for an annotation, and whether the option may be given several times."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _click_type(next(a for a in args if a is not type(None)))
    if origin is Literal:
        return click.Choice(args), False
    if origin is tuple:
        return args[0], True
    return annotation, False


def _told(settings: type[Settings], error: dict[str, Any]) -> str:
    """Return what is wrong, with the flag in place of the field. Settings wrong together name themselves."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{settings.flag_name(str(error['loc'][0]))} is {error['input']!r}: {message}" if error["loc"] else message
