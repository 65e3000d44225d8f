"""What a real `serve` tells of a request: lines of JSON with its id, never what it asks, and a span."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.processes import executable
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc
from tests.serve_process import serve_process
from tests.span_receiver import span_receiver

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = "the quick xylophone jumps"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass(slots=True, kw_only=True)
class Observed:
    """Everything that was written down while one request was served."""

    log: str
    others: list[bytes]  # stderr and Ray's own files
    span: Any
    attributes: dict[str, Any]
    ray_token: str
    ray_statuses: list[subprocess.CompletedProcess[str]]  # `ray status` without Ray's token, with a wrong one, with it


def ray_statuses(processes: Sequence[tuple[int, int]], token: str) -> list[subprocess.CompletedProcess[str]]:
    """What Ray's own command line is told by the cluster below a deployment."""
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid, _ in processes]
    [address] = {found[1] for line in commands if (found := re.search(r"--gcs-address=([\d.]+:\d+)", line))}
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    modes = (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * len(token)},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
    )
    command = [str(executable("ray")), "status", "--address", address]
    return [
        subprocess.run(command, env=bare | mode, capture_output=True, text=True, timeout=60, check=False)
        for mode in modes
    ]


def ask(address: str) -> None:
    """One request of a client that traces."""
    request = pb.GenerateRequest(
        request_id="asked", text=PROMPT, max_tokens=24, sampling=pb.Sampling(ignore_eos=True)
    )
    with grpc.insecure_channel(address) as channel:
        stub = slipstream_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        for _ in stub.Generate(request, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),)):
            pass


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    path = tmp_path_factory.mktemp("observed")
    flags = ("--log-format", "json", "--log-level", "debug", "--log-file", str(path / "log"))
    with (
        span_receiver() as receiver,
        serve_process(path, *flags, "--otlp-traces-endpoint", receiver.endpoint) as served,
    ):
        processes, directory = served.started()
        ask(served.address)
        [(span, attributes)] = receiver.take(1)
        token = (served.home / "slipstream" / "ray_token").read_text()
        statuses = ray_statuses(processes, token)
        # Ray's files end with the deployment.
        kept = [file.read_bytes() for file in directory.glob("session_*/logs/**/*") if file.is_file()]
        assert len(kept) > 4
    log = (path / "log").read_text()
    others = [served.errors.encode(), *kept]
    return Observed(
        log=log, others=others, span=span, attributes=attributes, ray_token=token, ray_statuses=statuses
    )


def test_no_prompt_is_in_any_log_and_each_line_is_json_with_the_id(observed: Observed) -> None:
    lines = [json.loads(line) for line in observed.log.splitlines()]
    events = [line["event"] for line in lines if line.get("request_id") == "asked"]
    assert sorted(events) == ["admitted", "finished", "first token", "seated"]
    assert {line["process"] for line in lines} == {"serve", "scheduler", "worker-0", "front-0"}
    assert "xylophone" not in observed.log
    assert not any(b"xylophone" in content for content in observed.others)


def test_rays_own_cluster_asks_for_a_token_that_is_written_nowhere(observed: Observed) -> None:
    without, wrong, right = observed.ray_statuses
    assert right.returncode == 0, right.stderr
    for refused in (without, wrong):
        assert refused.returncode != 0
        assert "Unauthenticated" in refused.stdout + refused.stderr
    assert len(observed.ray_token) == 64
    said = [answer.stdout + answer.stderr for answer in observed.ray_statuses]
    assert observed.ray_token not in observed.log + "".join(said)
    assert not any(observed.ray_token.encode() in content for content in observed.others)


def test_the_request_is_a_span_below_the_clients_at_the_endpoint_of_the_flag(observed: Observed) -> None:
    span, attributes = observed.span, observed.attributes
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert attributes["gen_ai.request.id"] == "asked"
    assert attributes["gen_ai.usage.completion_tokens"] == 24
    assert attributes["gen_ai.latency.time_in_queue"] > 0
    assert "xylophone" not in str(span)
