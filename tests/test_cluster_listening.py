"""Where a deployment listens: loopback unless told otherwise, and never in the open by oversight."""

import socket
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.config import DEFAULT_METRICS_PORT, ServeConfig
from cluster.listening import metrics_config, server_config
from cluster.loopback import is_loopback
from cluster.server import Server, ServerConfig
from tests.certificates import Authority
from tests.served import served
from tests.tiny_model import save_tiny_model


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True)),
        *(("", False), ("0.0.0.0", False), ("::", False), ("192.168.0.7", False), ("::ffff:10.0.0.1", False)),
    ],
)
def test_loopback_is_what_no_other_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["*", "no-such-host.invalid", "dns:///0.0.0.0", "x" * 300])
def test_a_host_without_an_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"^host '.*' has no address: "):
        is_loopback(host)


def test_a_name_counts_by_every_address_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*addresses: str) -> Any:
        return lambda *_args, **_options: [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found("127.0.0.1", "::1"))
    assert is_loopback("here")
    monkeypatch.setattr(socket, "getaddrinfo", found("127.0.0.1", "fe80::1%eth0"))
    assert not is_loopback("here")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 listens beyond loopback without TLS: give --tls-cert and --tls-key"),
        (["--host", "::"], "or --insecure"),
        (["--host", "0.0.0.0", "--auth-token-file", "tokens"], "listens beyond loopback without TLS"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key are needed together"),
        (["--tls-key", "key.pem"], "--tls-cert and --tls-key are needed together"),
        (["--tls-client-ca", "ca.pem"], "--tls-client-ca needs --tls-cert and --tls-key"),
        (["--metrics-host", "0.0.0.0"], "--metrics-host 0.0.0.0 listens beyond loopback, and metrics have no TLS"),
        (["--metrics-port", "70000"], "--metrics-port must be in [0, 65535], got 70000"),
    ],
)
def test_listening_in_the_open_is_refused_in_one_line_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _refused(capsys, "serve", *flags)


def test_files_that_are_none_are_refused_in_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    save_tiny_model(tmp_path / "model")
    missing, pair = str(tmp_path / "missing"), Authority(tmp_path / "tls").issue()
    serve = ("serve", "--model", str(tmp_path / "model"), "--port", "0")
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    assert f"--tls-cert {missing} cannot be read" in _refused(
        capsys, *serve, "--tls-cert", missing, "--tls-key", missing
    )
    assert f"--tls-client-ca {missing} cannot be read" in _refused(capsys, *serve, *tls, "--tls-client-ca", missing)
    assert f"--auth-token-file {missing} cannot be read" in _refused(capsys, *serve, "--auth-token-file", missing)
    (tmp_path / "tokens").write_text("secret a b\n")
    refusal = _refused(capsys, *serve, "--admin-token-file", str(tmp_path / "tokens"))
    assert "--admin-token-file" in refusal
    assert "secret" not in refusal
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--metrics-port {port} on --metrics-host 127.0.0.1" in _refused(capsys, *serve, "--metrics-port", port)


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, ""), err
    [line] = [line for line in err.splitlines() if not line.startswith("Fetching")]
    assert line.startswith("error: ")
    return line


async def test_a_server_of_its_own_refuses_to_listen_in_the_open_too(tmp_path: Path) -> None:
    async with served() as up:
        for host in ("0.0.0.0", "::"):
            with pytest.raises(ValueError, match="listens beyond loopback without TLS"):
                await Server(up.serving, ServerConfig(host=host)).start()
    for config in (
        ServerConfig(host="0.0.0.0", insecure=True),
        ServerConfig(host="0.0.0.0", tls=Authority(tmp_path).server()),
    ):
        config.check()


def test_flags_become_what_each_front_end_listens_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ServeConfig(
        host="0.0.0.0", port=7000, tls_cert="c.pem", tls_key="k.pem", tls_client_ca="ca.pem", auth_token_file="tokens"
    )
    server = server_config(config, 2)
    assert server.tls is not None
    assert (server.host, server.port, server.tls.paths) == (
        "0.0.0.0",
        7002,
        (tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "ca.pem"),
    )
    assert (server.auth_token_file, server.admin_token_file, server.insecure) == (tmp_path / "tokens", None, False)
    assert server_config(ServeConfig(port=0), 2).port == 0


def test_metrics_are_on_a_loopback_port_of_each_front_end_unless_switched_off() -> None:
    first, second = metrics_config(ServeConfig(), 0), metrics_config(ServeConfig(metrics_port=9000), 1)
    assert first is not None
    assert (first.host, first.port, first.any_port, first.with_scheduler) == (
        "127.0.0.1",
        DEFAULT_METRICS_PORT,
        True,
        True,
    )
    assert second is not None
    assert (second.port, second.any_port, second.with_scheduler) == (9001, False, False)
    assert metrics_config(ServeConfig(metrics_port=0), 0) is None
