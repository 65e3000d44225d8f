"""TLS on the port: who is let in, who is not, and certificates that are replaced while we serve."""

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.client import Client
from cluster.server import ServerConfig
from cluster.tls import TlsFiles, channel_credentials
from tests.certificates import Authority
from tests.served import Served, served

EXPIRED = timedelta(hours=-1)


async def asked(up: Served, **security: Any) -> list[int]:
    """Two tokens from a new connection."""
    async with Client(up.server.address, **security) as client:
        return (await client.generate([5, 6], max_tokens=2, timeout_s=20.0).aresult()).token_ids


async def refused(up: Served, **security: Any) -> None:
    """A new connection does not come about."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked(up, **security)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


async def test_a_server_with_tls_answers_those_who_trust_it_and_no_plain_connection(authority: Authority) -> None:
    async with served(config=ServerConfig(tls=authority.server())) as up:
        assert len(await asked(up, ca=authority.ca)) == 2
        await refused(up)
        with Client(up.server.address, ca=authority.ca) as client:  # for threads too
            assert client.token is None


async def test_a_client_refuses_a_server_of_another_authority_or_past_its_time(
    authority: Authority, tmp_path: Path
) -> None:
    async with served(config=ServerConfig(tls=authority.server())) as up:
        await refused(up, ca=Authority(tmp_path / "theirs").ca)
        await refused(up, tls=True)  # the system's authorities
    expired = authority.issue("expired", expires_in=EXPIRED)
    async with served(config=ServerConfig(tls=authority.server(expired))) as up:
        await refused(up, ca=authority.ca)


async def test_mutual_tls_refuses_clients_without_a_good_certificate_and_goes_on_serving(
    authority: Authority, tmp_path: Path
) -> None:
    theirs = Authority(tmp_path / "theirs").issue("client")
    ours, expired = authority.issue("client"), authority.issue("expired", expires_in=EXPIRED)
    async with served(config=ServerConfig(tls=authority.server(client_ca=authority.ca))) as up:
        await refused(up, ca=authority.ca)
        await refused(up, ca=authority.ca, cert=theirs.cert, key=theirs.key)
        await refused(up, ca=authority.ca, cert=expired.cert, key=expired.key)
        assert len(await asked(up, ca=authority.ca, cert=ours.cert, key=ours.key)) == 2


async def test_a_replaced_certificate_serves_new_connections_and_keeps_open_ones(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "next")
    pair, new = authority.issue(), other.issue("new")
    async with (
        served(config=ServerConfig(tls=authority.server(pair))) as up,
        Client(up.server.address, ca=authority.ca) as old,
    ):
        assert len((await old.generate([5], max_tokens=2).aresult()).token_ids) == 2
        pair.replace_with(new)
        assert len(await asked(up, ca=other.ca)) == 2
        await refused(up, ca=authority.ca)
        assert len((await old.generate([5], max_tokens=2).aresult()).token_ids) == 2


async def test_a_certificate_replaced_by_rubbish_leaves_the_old_one(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue()
    async with served(config=ServerConfig(tls=authority.server(pair))) as up:
        await asked(up, ca=authority.ca)  # the certificate it was started with is presented once in any case
        pair.key.write_text("half of a key")
        assert len(await asked(up, ca=authority.ca)) == 2
        assert len(await asked(up, ca=authority.ca)) == 2
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("keeping what was read before: --tls-cert")


def test_files_that_are_no_certificate_and_key_are_refused_by_name(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue(), authority.issue("other")
    missing, rubbish = tmp_path / "missing.pem", tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    for files, message in (
        (TlsFiles(cert=missing, key=pair.key), f"--tls-cert {missing} cannot be read: No such file or directory"),
        (TlsFiles(cert=pair.cert, key=other.key), "are no PEM certificate and its key: key values mismatch"),
        (TlsFiles(cert=rubbish, key=pair.key), "are no PEM certificate and its key"),
        (TlsFiles(cert=pair.cert, key=pair.key, client_ca=rubbish), "--tls-client-ca .* holds no PEM certificate"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            files.read()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="both of them"):
        channel_credentials(cert=pair.cert)


async def test_nothing_older_than_tls_1_2_is_spoken(authority: Authority) -> None:
    async with served(config=ServerConfig(tls=authority.server())) as up:
        context = ssl.create_default_context(cafile=str(authority.ca))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        await _handshake_fails(up.server.port, context)


async def _handshake_fails(port: int, context: ssl.SSLContext) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port, ssl=context)
