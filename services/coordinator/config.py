"""Settings of the coordinator."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from services.common.rpc.addresses import is_loopback
from services.common.rpc.settings import ServerSettings, missing_of_pair
from services.common.rpc.tls import ClientFiles
from services.common.specdec.types import MAX_GAMMA
from services.coordinator.overlap import OverlapMode


class CoordinatorSettings(ServerSettings):
    """Settings of the coordinator; each also by environment, PACELINE_COORDINATOR_<NAME>."""

    env_prefix: ClassVar[str] = "PACELINE_COORDINATOR_"

    listen: str = Field("127.0.0.1:50050", description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    target: str = Field("127.0.0.1:50052", description="Target workers, a gRPC name: HOST:PORT, dns:///name:port.")
    draft: str = Field("127.0.0.1:50051", description="Draft workers, a gRPC name; empty for none.")
    tokens: str = Field(
        "", description="File of bearer tokens, [NAME:]TOKEN a line: calls need one of them; read anew when it changes."
    )
    workers_tls_ca: str = Field(
        "", description="PEM file: TLS to the workers, whose certificates one of these has signed; empty: plain text."
    )
    workers_tls_cert: str = Field(
        "", description="PEM file: the certificate that workers are shown, with its chain; read anew when it changes."
    )
    workers_tls_key: str = Field("", description="PEM file: the key of --workers-tls-cert.")
    workers_tls_name: str = Field(
        "", description="Name that workers' certificates have to have, in place of the one in --target and --draft."
    )
    max_request_mib: int = Field(16, ge=1, le=1024, description="Largest request of a client, in MiB.")
    default_max_tokens: int = Field(512, ge=1, description="Tokens of an answer whose request does not say.")
    default_deadline_s: float = Field(600.0, gt=0, description="Time of a request whose client sets no deadline.")
    max_deadline_s: float = Field(3600.0, gt=0, description="Longest time of a request, whatever its client asks.")
    adaptive_gamma: bool = Field(
        True, description="Choose gamma anew for each round by what pays, where the request does not say."
    )
    default_gamma: int = Field(
        4, ge=0, description="Drafts in a round where the request does not say and gamma may not adapt."
    )
    max_gamma: int = Field(16, ge=0, le=MAX_GAMMA, description="Most drafts in a round.")
    overlap: OverlapMode = Field(
        "auto", description="Drafting goes on while the target verifies; auto: where that is found to take less time."
    )
    max_requests: int = Field(256, ge=1, description="Requests served at once; more get RESOURCE_EXHAUSTED.")
    draft_timeout_s: float = Field(
        1.0, gt=0, description="A round waits this long for its drafts, then goes on with those that have come."
    )
    verify_timeout_s: float = Field(
        300.0, gt=0, description="A target that answers nothing for this long is given up; its queue counts."
    )
    partial_rows: bool = Field(
        True, description="Have the unlikely part of a row of p stay with the target until a draw falls on it."
    )
    row_head: int | None = Field(
        None,
        ge=0,
        le=65_536,
        description="Entries of such a row beside those that its drafts need; unset follows the draws, 32 to 1024.",
    )
    client_traces: bool = Field(
        True,
        description="Go on with a client's trace, sampled if it says so; off: begin another, with a link to it.",
    )
    target_retry_s: float = Field(30.0, ge=0, description="A lost target is looked for this long, then UNAVAILABLE.")

    @property
    def worker_files(self) -> ClientFiles | None:
        """Certificates for the links to the workers; None for plain text."""
        if not self.workers_tls_ca:
            return None
        return ClientFiles(
            *(self.workers_tls_ca, self.workers_tls_cert, self.workers_tls_key, self.workers_tls_name),
            flags=("--workers-tls-ca", "--workers-tls-cert", "--workers-tls-key"),
        )

    @property
    def open_links(self) -> dict[str, str]:
        """The flags and addresses of links to workers that leave this machine in plain text."""
        addresses = {"--target": self.target, "--draft": self.draft}
        plain = {} if self.workers_tls_ca else addresses
        return {flag: address for flag, address in plain.items() if address and not is_loopback(address)}

    @model_validator(mode="after")
    def _worker_links_are_safe(self) -> CoordinatorSettings:
        flags = "--workers-tls-cert", "--workers-tls-key"
        if fault := missing_of_pair(self.workers_tls_cert, self.workers_tls_key, flags):
            raise ValueError(fault)
        for flag, value in ((flags[0], self.workers_tls_cert), ("--workers-tls-name", self.workers_tls_name)):
            if value and not self.workers_tls_ca:
                raise ValueError(f"{flag} is {value}: needs --workers-tls-ca, who signed the workers' certificates")
        for flag, address in self.open_links.items():
            if not self.insecure:
                told = "on another machine: needs --workers-tls-ca, or --insecure for plain text"
                raise ValueError(f"{flag} is {address}, {told}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> CoordinatorSettings:
        if self.default_gamma > self.max_gamma:
            raise ValueError(f"--default-gamma is {self.default_gamma}: must be at most --max-gamma, {self.max_gamma}")
        if self.default_deadline_s > self.max_deadline_s:
            raise ValueError(
                f"--default-deadline-s is {self.default_deadline_s:g}: must be at most --max-deadline-s,"
                f" {self.max_deadline_s:g}"
            )
        return self
