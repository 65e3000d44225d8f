"""`slipstream serve` with certificates and tokens, as its users and its scraper meet it."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import Client
from tests import tiny_tokenizer
from tests.certificates import Authority
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

FLAGS = ["--port", "0", "--max-num-seqs", "4", "--threads", "1"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def told(tmp_path: Path, authority: Authority) -> Iterator[dict[str, str]]:
    """What a secured `slipstream serve` printed once it is ready: word -> the rest of its line."""
    save_tiny_model(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")
    (tmp_path / "tokens").write_text("alpha acme limit=4\n")
    (tmp_path / "admin").write_text("omega\n")
    pair = authority.issue()
    security = ["--tls-cert", pair.cert, "--tls-key", pair.key]
    security += ["--auth-token-file", tmp_path / "tokens", "--admin-token-file", tmp_path / "admin"]
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", str(tmp_path / "model"), *FLAGS]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [*command, *map(str, security)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            printed = {}
            for line in process.stdout:
                word, _, rest = line.strip().partition(" ")
                printed[word] = rest
                if word == "ready":
                    break
            yield printed
        finally:
            process.terminate()
            process.wait(60)


def test_a_secured_deployment_serves_those_it_knows_and_shows_its_metrics(
    told: dict[str, str], authority: Authority, tmp_path: Path
) -> None:
    with Client(told["ready"], ca=authority.ca, token="alpha") as client:
        assert len(client.generate([5, 6], max_tokens=8, ignore_eos=True).result().token_ids) == 8
        with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
            client.stats()
    for stranger, code in (
        (Client(told["ready"], ca=authority.ca), "UNAUTHENTICATED"),
        (Client(told["ready"], token="alpha"), "UNAVAILABLE"),
    ):
        with stranger, pytest.raises(grpc.RpcError, match=code):
            stranger.generate([5, 6], max_tokens=8).result()

    asked = _run(tmp_path, "generate", "hello", "--max-tokens", "4", "--token-file", str(tmp_path / "tokens"))
    assert (asked.returncode, asked.stderr) == (0, "")
    status = _run(tmp_path, "status", "--json", "--token-file", str(tmp_path / "admin"))
    assert '"num_free_blocks"' in status.stdout, status.stderr
    refused = _run(tmp_path, "status", "--token-file", str(tmp_path / "tokens"))
    assert refused.stderr == "error: PERMISSION_DENIED: this call needs an operator's token\n"

    with urllib.request.urlopen(told["metrics"], timeout=20) as page:
        families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
    assert told["metrics"].startswith("http://127.0.0.1:")
    assert families["slipstream_prompt_tokens"].samples[0].value > 2
    assert families["slipstream_scheduler_up"].samples[0].value == 1
    assert families["slipstream_workers_up"].samples[0].value == 1


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command with trust in the server."""
    command = [sys.executable, "-m", "cluster.cli", *arguments, "--ca", str(tmp_path / "tls" / "authority.pem")]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "home")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
