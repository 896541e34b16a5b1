"""What does not go together is refused at start, and so is plain text beyond this machine unless it is asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.rpc.addresses import is_loopback
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.rpc.tls import ClientFiles, ClientTls
from services.common.specdec.errors import StartupError
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from tests.support.certificates import Authority


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50050", True),
        ("127.8.0.1:50050", True),
        ("localhost:50050", True),
        ("[::1]:50050", True),
        ("dns:///localhost:50050", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
        ("ipv6:[::1]:1", True),
        ("unix:/run/paceline", True),
        ("0.0.0.0:50050", False),
        ("[::]:50050", False),
        (":50050", False),
        ("10.0.0.1:50050", False),
        ("dns:///target-worker:50052", False),
        ("dns://127.0.0.1/target-worker:50052", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("localhost.example.com:1", False),
        ("xds:///localhost:1", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_rest(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"listen": "0.0.0.0:1"},
            "--listen is 0.0.0.0:1, which others reach: needs --tls-cert and --tls-key, or --insec",
        ),
        ({"tls_cert": "a.crt"}, "--tls-cert is a.crt: needs --tls-key too"),
        ({"tls_key": "a.key"}, "--tls-key is a.key: needs --tls-cert too"),
        ({"tls_ca": "ca.crt"}, "--tls-ca is ca.crt: needs --tls-cert and --tls-key too"),
        ({"tls_cert": "a", "tls_key": "b", "tls_clients": "c"}, "--tls-clients is c: needs --tls-ca"),
        ({"tls_cert": "a", "tls_key": "b", "tls_ca": "c", "tls_clients": " ,"}, "has no name in it"),
        ({"target": "dns:///t:1"}, "--target is dns:///t:1, on another machine: needs --workers-tls-ca, or --insecure"),
        ({"draft": "10.0.0.1:1"}, "--draft is 10.0.0.1:1, on another machine: needs --workers-tls-ca, or --insecure"),
        ({"workers_tls_key": "a"}, "--workers-tls-key is a: needs --workers-tls-cert too"),
        ({"workers_tls_cert": "a", "workers_tls_key": "b"}, "--workers-tls-cert is a: needs --workers-tls-ca"),
        ({"workers_tls_name": "a"}, "--workers-tls-name is a: needs --workers-tls-ca"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CoordinatorSettings.model_validate(settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": "0.0.0.0:1", "insecure": True},
        {"listen": "0.0.0.0:1", "tls_cert": "a", "tls_key": "b"},
        {"target": "dns:///t:1", "draft": "dns:///d:1", "insecure": True},
        {"target": "dns:///t:1", "draft": "dns:///d:1", "workers_tls_ca": "ca"},
        {"draft": ""},
    ],
)
def test_settings_that_do(settings: dict[str, Any]) -> None:
    CoordinatorSettings.model_validate(settings)


async def test_plain_text_that_was_asked_for_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"listen": "0.0.0.0:0", "target": "dns:///nowhere.invalid:1", "draft": "", "insecure": True}
    coordinator = Coordinator(CoordinatorSettings.model_validate(settings))
    await coordinator.start()
    await coordinator.stop()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for link in (f"in plain text on {coordinator.address}", "in plain text to dns:///nowhere.invalid:1"):
        assert any(message.startswith(link) for message in warned), warned


async def test_on_this_machine_there_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(ServerSettings(), [])
    await server.listen()
    await server.close()
    assert "plain text" not in caplog.text


def spoilt(folder: Path, what: str) -> dict[str, str]:
    """Return a server's settings with something wrong with one of the files."""
    authority = Authority(folder)
    one, other = authority.issue("one"), authority.issue("other")
    files = {**one.as_server, "tls_ca": authority.cert}
    if what == "missing":
        Path(one.cert).unlink()
    elif what == "another key":
        files["tls_key"] = other.key
    elif what == "cut":
        Path(one.cert).write_bytes(Path(one.cert).read_bytes()[:200])
    elif what == "no authority":
        Path(authority.cert).write_text("")
    elif what == "a key for an authority":
        files["tls_ca"] = other.key
    return files


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("missing", "one.crt cannot be read: No such file"),
        ("another key", "KEY_VALUES_MISMATCH"),
        ("cut", "one.key: cannot be used"),
        ("no authority", "authority.crt: cannot be used"),
        ("a key for an authority", "other.key: cannot be used"),
    ],
)
async def test_files_that_cannot_be_used_are_named(tmp_path: Path, what: str, named: str) -> None:
    files = spoilt(tmp_path, what)
    with pytest.raises(StartupError) as refused:
        Server(ServerSettings.model_validate(files), [])
    assert named in str(refused.value)
    with pytest.raises(StartupError) as refused:
        ClientTls(ClientFiles(files["tls_ca"], files["tls_cert"], files["tls_key"]))
    assert named in str(refused.value)
    assert "PRIVATE" not in str(refused.value)


async def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("locked", pass_phrase=b"a secret")
    with pytest.raises(StartupError, match="cannot be used"):
        Server(ServerSettings.model_validate(pair.as_server), [])
