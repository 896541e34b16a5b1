"""Certificates replaced under running streams: those go on, new connections have the new ones."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.common.rpc.server import Server
from services.common.rpc.tls import ClientFiles
from tests.support.certificates import Authority
from tests.tls.links import Conversation, channel_to, serving, shown_on


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so; files are looked at once a second."""
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0.05)


async def certificate_of(server: Server) -> str:
    """Return what a new connection is shown."""
    host, _, port = server.address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_a_server_shows_the_new_certificate_and_old_streams_go_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("worker")
    async with serving(**pair.as_server) as server, channel_to(server, ClientFiles(authority.cert)) as channel:
        stream = Conversation(channel)
        assert await stream.goes_on()
        first = Path(pair.cert).read_text()
        assert await certificate_of(server) == first
        authority.issue("worker")
        second = Path(pair.cert).read_text()
        assert second != first

        async def shows_second() -> bool:
            return await certificate_of(server) == second

        await until(shows_second)
        assert await stream.goes_on()
        await stream.end()


async def test_a_client_shows_its_new_certificate_on_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("coordinator")
    settings = {**authority.issue("worker").as_server, "tls_ca": authority.cert}
    files = ClientFiles(authority.cert, pair.cert, pair.key)
    async with serving(**settings) as server, channel_to(server, files) as channel:
        stream = Conversation(channel)
        assert await stream.goes_on()
        first = Path(pair.cert).read_text()
        assert await shown_on(channel) == first
        authority.issue("coordinator")
        second = Path(pair.cert).read_text()

        async def shows_second() -> bool:
            shown = await shown_on(channel)
            assert shown in (first, second)
            return shown == second

        await until(shows_second)
        # On the connection of before: only its calls keep that open.
        assert await stream.goes_on()
        await stream.end()


async def test_a_new_authority_as_a_volume_swaps_its_link(tmp_path: Path) -> None:
    """Both ends are given another authority at once, the way that Kubernetes does it."""
    for generation in ("first", "second"):
        (tmp_path / generation).mkdir()
        authority = Authority(tmp_path / generation)
        authority.issue("worker")
        authority.issue("coordinator")
    data = tmp_path / "data"
    data.symlink_to("first")
    at = {name: str(data / name) for name in ("authority.crt", "worker.crt", "worker.key")}
    settings = {"tls_cert": at["worker.crt"], "tls_key": at["worker.key"], "tls_ca": at["authority.crt"]}
    files = ClientFiles(at["authority.crt"], str(data / "coordinator.crt"), str(data / "coordinator.key"))
    async with serving(**settings) as server, channel_to(server, files) as channel:
        stream = Conversation(channel)
        assert await stream.goes_on()
        (tmp_path / "next").symlink_to("second")
        os.replace(tmp_path / "next", data)
        wanted = (tmp_path / "second" / "coordinator.crt").read_text()

        async def shows_second() -> bool:
            return await shown_on(channel) == wanted

        await until(shows_second)
        assert await stream.goes_on()
        await stream.end()


async def test_a_pair_of_two_generations_leaves_the_old_one_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    pair = authority.issue("worker")
    first = Path(pair.cert).read_text()
    new = authority.issue("new")

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    async with serving(**pair.as_server) as server, channel_to(server, ClientFiles(authority.cert)) as channel:
        Path(pair.cert).write_text(Path(new.cert).read_text())

        async def has_told() -> bool:
            assert await certificate_of(server) == first
            return bool(errors())

        await until(has_told)
        # Looked at once more at least.
        await asyncio.sleep(1.1)
        assert await certificate_of(server) == first
        (told,) = errors()
        assert f"--tls-cert {pair.cert} and --tls-key {pair.key}: cannot be used: KEY_VALUES_MISMATCH" in told
        assert await shown_on(channel) == ""
        Path(pair.key).write_text(Path(new.key).read_text())
        second = Path(new.cert).read_text()

        async def shows_second() -> bool:
            return await certificate_of(server) == second

        await until(shows_second)
        assert len(errors()) == 1
