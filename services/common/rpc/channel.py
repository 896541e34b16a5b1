"""Channels to workers and to the coordinator: balanced, health-checked, and quick to notice a silent peer."""

from __future__ import annotations

import json
from typing import Any

import grpc

from services.common.rpc.renewed import RenewedChannel
from services.common.rpc.tls import ClientTls

# Clients may ping this often without being told to stop; the spelling min_recv_ping_... is silently ignored by gRPC.
_MIN_PING_INTERVAL_MS = 1_000


def message_options(max_message_mib: int, receive_mib: int | None = None) -> list[tuple[str, Any]]:
    """Return the size limits: gRPC's own default of 4 MiB is less than a few rows of a large vocabulary."""
    send, receive = max_message_mib * 2**20, (receive_mib or max_message_mib) * 2**20
    return [("grpc.max_receive_message_length", receive), ("grpc.max_send_message_length", send)]


def keepalive_options(keepalive_s: float) -> list[tuple[str, Any]]:
    """Return options that find a peer that vanished without a word within twice `keepalive_s`."""
    interval_ms = int(keepalive_s * 1000)
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", interval_ms),
        ("grpc.http2.ping_timeout_ms", interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def open_channel(
    address: str,
    service: str,
    *,
    max_message_mib: int,
    keepalive_s: float,
    tls: ClientTls | None = None,
) -> grpc.aio.Channel:
    """Open a channel that spreads its calls over all pods behind an address that say they serve.

    Args:
        address: gRPC target, for example `dns:///draft-worker:50051` or `127.0.0.1:4000`.
        service: Full name whose health is watched; a pod that is NOT_SERVING gets no new call.
        max_message_mib: Largest message, both ways.
        keepalive_s: How often a silent peer is pinged.
        tls: Credentials; None for plain text.
    """
    options = _options(service, max_message_mib, keepalive_s)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return RenewedChannel(tls, lambda credentials: grpc.aio.secure_channel(address, credentials, options=options))


def _options(service: str, max_message_mib: int, keepalive_s: float) -> list[tuple[str, Any]]:
    service_config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return [
        *message_options(max_message_mib),
        *keepalive_options(keepalive_s),
        ("grpc.service_config", json.dumps(service_config)),
        # A proxy that the environment names is for the world outside, not for our own pods.
        ("grpc.enable_http_proxy", 0),
        # Retrying is the coordinator's: it knows what to send again.
        ("grpc.enable_retries", 0),
        # A restarted worker is found within a second or two; gRPC's own back-off goes up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long an attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # When every pod is replaced at once, their new addresses are wanted well before a lost target is given up.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ]
