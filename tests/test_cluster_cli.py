"""The command line: what it refuses, in one line and with exit code 2, before anything is started.

These are unit tests: `ray.init` raises here, so a refusal that came too late would be seen.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.cli import main
from tests.tiny_model import save_tiny_model

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """Runs a command and returns the one line that refuses it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert exit_.value.code == 2, err
        assert out == ""
        [line] = [line for line in err.splitlines() if not line.startswith("Fetching")]
        assert line.startswith("error: ")
        return line

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is not implemented"),
        (["--data-parallel-size", "0"], "--data-parallel-size must be in [1, 1024], got 0"),
        (["--max-steps-in-flight", "5"], "--max-steps-in-flight must be in [1, 4], got 5"),
        (["--block-size", "7"], "--block-size must be one of 8, 16, 32, 64, 128, got 7"),
        (["--dtype", "int8"], "--dtype must be one of auto, bfloat16, float16, float32, got 'int8'"),
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy must be one of fcfs, priority, got 'lifo'"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be in (0, 1], got 1.5"),
        (["--speculative-config", "{"], "--speculative-config is not JSON"),
        (["--speculative-config", '{"k": 1}'], "--speculative-config: unknown key 'k'"),
        (
            ["--speculative-config", '{"method": "medusa"}'],
            "method must be one of ngram, eagle3, draft_model, got 'medusa'",
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": -1}'],
            "num_speculative_tokens must be in [0, 64], got -1",
        ),
        (["--max-num-seqs", "many"], "Invalid value for '--max-num-seqs'"),
    ],
)
def test_a_flag_out_of_range_is_refused_by_name(flags: list[str], message: str, refused: Refused) -> None:
    assert message in refused("serve", *flags)


@pytest.mark.parametrize("flags", [["--tls-cert", "c.pem", "--tls-key", "k.pem"], ["--auth-token-file", "tokens"]])
def test_http_before_what_smg_cannot_reach_is_refused(flags: list[str], refused: Refused) -> None:
    assert "--http: smg reaches its servers with neither TLS nor tokens" in refused("serve", "--http", "8000", *flags)


def test_an_unknown_model_is_refused_by_name(tmp_path: Path, refused: Refused) -> None:
    assert "--model 'no/such-model' is unknown" in refused("serve", "--model", "no/such-model")
    assert "has no config.json" in refused("serve", "--model", str(tmp_path))


def test_a_damaged_safetensors_file_is_refused_by_name(model: Path, refused: Refused) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refused("serve", "--model", str(model))


def test_a_port_in_use_is_refused_by_name(model: Path, taken_port: int, refused: Refused) -> None:
    line = refused("serve", "--model", str(model), "--port", str(taken_port))
    assert f"--port {taken_port} on --host 127.0.0.1" in line


def test_a_pool_too_small_for_one_sequence_is_refused_with_both_numbers(model: Path, refused: Refused) -> None:
    line = refused("serve", "--model", str(model), "--num-gpu-blocks-override", "3")
    assert "3 blocks of 16 tokens hold less than one sequence of --max-model-len 256, which needs 16" in line


def test_a_length_beyond_the_models_is_refused(model: Path, refused: Refused) -> None:
    line = refused("serve", "--model", str(model), "--max-model-len", "257")
    assert "--max-model-len 257 is beyond the model's max_position_embeddings 256" in line


@pytest.mark.parametrize("command", [["status"], ["down"], ["generate", "hello"]])
def test_commands_to_a_server_say_that_none_runs(command: list[str], refused: Refused) -> None:
    assert "no server runs on this machine" in refused(*command)


def test_the_process_itself_exits_with_code_2() -> None:
    command = [sys.executable, "-m", "cluster.cli", "serve", "--tensor-parallel-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --tensor-parallel-size 2 is not implemented; a worker is one device (1)\n"
