"""Ray's own processes are killed: clients are told in time, and `serve` says what to do and ends without a trace."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from cluster.processes import command_line, wait_until_gone
from cluster.ray_watch import LOST_AFTER_S, PROBE_EVERY_S, PROBE_TIMEOUT_S
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc
from tests.serve_process import ServeProcess, serve_process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

BOUND_S = LOST_AFTER_S + PROBE_EVERY_S + 4 * PROBE_TIMEOUT_S
CALL_TIMEOUT_S = END_TIMEOUT_S = 60.0
PROMPT, MAX_TOKENS = [5, 6, 7], 200
OWN = ("gcs_server", "raylet")  # the files of Ray's own processes


def own(channel: Any) -> Any:
    """One stream of slipstream.v1.Inference."""
    sampling = pb.Sampling(ignore_eos=True)
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), max_tokens=MAX_TOKENS, sampling=sampling)
    stub = slipstream_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    return stub.Generate(request, timeout=CALL_TIMEOUT_S)


def vllm(channel: Any) -> Any:
    """One stream of the vLLM engine protocol."""
    params = vllm_pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    request = vllm_pb.GenerateRequest(
        request_id=f"v{time.monotonic_ns()}",
        tokenized=vllm_pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=params,
        stream=True,
    )
    return vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=CALL_TIMEOUT_S)


def refused(ask: Callable[[Any], Any], channel: Any) -> tuple[str, float]:
    """Streams one after the other until one ends with an error: what it says, and when."""
    while True:
        try:
            for _ in ask(channel):
                pass
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}", time.monotonic()


def kill(served: ServeProcess, names: tuple[str, ...]) -> float:
    """SIGKILL for those of Ray's own processes that this serve started; when."""
    processes, _ = served.started()
    files = {Path(command_line(pid).partition(" ")[0]).name: pid for pid, _ in processes}
    for name in names:
        os.kill(files[name], signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize(
    "killed", [OWN, pytest.param(OWN[:1], marks=pytest.mark.slow), pytest.param(OWN[1:], marks=pytest.mark.slow)]
)
def test_streams_end_in_time_when_ray_is_killed_and_serve_says_what_to_do(
    tmp_path: Path, killed: tuple[str, ...]
) -> None:
    with serve_process(tmp_path) as served, grpc.insecure_channel(served.address) as channel:
        processes, directory = served.started()
        with ThreadPoolExecutor() as threads:
            streams = [threads.submit(refused, ask, channel) for ask in (own, vllm)]
            next(own(channel))  # it serves
            killed_s = kill(served, killed)
            ends = [stream.result(BOUND_S) for stream in streams]
        for told, ended_s in ends:
            assert told.startswith("UNAVAILABLE: the Ray cluster is lost"), told
            assert ended_s - killed_s < BOUND_S
        asked_s = time.monotonic()
        assert refused(own, channel)[0].startswith("UNAVAILABLE")
        assert time.monotonic() - asked_s < PROBE_TIMEOUT_S
        assert served.process.wait(END_TIMEOUT_S) == 1
        [error] = [line for line in served.errors.splitlines() if line.startswith("error: ")]
        assert error.startswith("error: the Ray cluster is lost")
        assert "start it again" in error
        assert wait_until_gone(processes, 0.0) == []
        assert not directory.exists()
        assert not list((served.home / "slipstream").glob("*.json"))
