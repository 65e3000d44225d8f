"""Values survive the wire, the committed stubs are those of the proto, and no two protos clash."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import codec
from cluster.choice import Finish, Logprobs, Output
from cluster.codec import Received, Start
from cluster.text import ChatMessage
from cluster.validate import ClientRequest, ClientSampling
from protos import slipstream_pb2 as pb
from protos.generate import ROOT, STUBS, generate
from scheduler.request import FinishReason

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
real = st.floats(allow_nan=False)
prompts = st.one_of(
    st.text(min_size=1),
    st.lists(int32, min_size=1, max_size=5),
    st.lists(st.builds(ChatMessage, role=st.text(), content=st.text()), min_size=1, max_size=3),
)
samplings = st.builds(
    ClientSampling,
    temperature=st.none() | real,
    top_p=st.none() | real,
    top_k=st.none() | int32,
    min_p=st.none() | real,
    repetition_penalty=st.none() | real,
    presence_penalty=st.none() | real,
    frequency_penalty=st.none() | real,
    logit_bias=st.dictionaries(int32, real, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    stop_token_ids=st.lists(int32, max_size=3).map(tuple),
    min_tokens=st.none() | int32,
    ignore_eos=st.booleans(),
)
requests = st.builds(
    ClientRequest,
    request_id=st.text(),
    attempt=st.integers(0, 100),
    model=st.text(),
    prompt=prompts,
    sampling=samplings,
    max_tokens=st.none() | int32,
    stop=st.lists(st.text(), max_size=3).map(tuple),
    include_stop_str=st.booleans(),
    skip_special_tokens=st.booleans(),
    n=st.none() | int32,
    num_logprobs=st.none() | int32,
    max_drafts=st.none() | int32,
    priority=int32,
    cache_salt=st.text(),
    tenant=st.text(),
    resume_token_ids=st.lists(int32, max_size=3).map(tuple),
)


@given(requests)
def test_a_request_survives_the_wire(request: ClientRequest) -> None:
    wire = codec.encode_generate_request(request).SerializeToString()
    decoded = codec.decode_generate_request(pb.GenerateRequest.FromString(wire), None)
    sampling = replace(decoded.sampling, logit_bias=tuple(sorted(decoded.sampling.logit_bias)))
    assert replace(decoded, sampling=sampling) == request


def test_an_output_survives_the_wire() -> None:
    logprobs = Logprobs(
        logprobs=np.array([-0.5, -1.5], np.float32),
        top_token_ids=np.array([[1, 2], [3, 4]], np.int32),
        top_logprobs=np.array([[-0.5, -2.0], [-1.5, -3.0]], np.float32),
    )
    finish = Finish(reason=FinishReason.STOP, stop_string="x", num_draft_tokens=9, inexact=True)
    output = Output(index=2, offset=7, token_ids=(8, 9), text_offset=3, text="中文", logprobs=logprobs, finish=finish)
    start = Start(request_id="r", seed=(1 << 64) - 1, choice_seed=5, num_prompt_tokens=4)
    wire = codec.encode_received(Received(output=output, start=start)).SerializeToString()
    received = codec.decode_received(pb.GenerateResponse.FromString(wire))
    assert received.start == start
    got = received.output
    assert (got.index, got.offset, got.token_ids, got.text_offset, got.text) == (2, 7, (8, 9), 3, "中文")
    assert got.finish == finish
    assert got.logprobs is not None
    np.testing.assert_array_equal(got.logprobs.logprobs, logprobs.logprobs)
    np.testing.assert_array_equal(got.logprobs.top_token_ids, logprobs.top_token_ids)
    np.testing.assert_array_equal(got.logprobs.top_logprobs, logprobs.top_logprobs)


def test_a_stop_id_of_zero_is_not_lost() -> None:
    output = Output(
        index=0,
        offset=0,
        token_ids=(0,),
        text_offset=0,
        text="",
        finish=Finish(reason=FinishReason.STOP, stop_token_id=0),
    )
    received = codec.decode_received(codec.encode_received(Received(output=output)))
    assert received.output.finish is not None
    assert received.output.finish.stop_token_id == 0


def test_stats_survive_the_wire() -> None:
    stats = {"n": 3, "ratio": 0.5, "by": {"a": (1, 2)}, "session": 1 << 60, "name": "x", "none": None, "yes": True}
    decoded = codec.decode_stats(codec.encode_stats(stats, {"open": np.int64(2)}))
    assert decoded["scheduler"] == stats | {"by": {"a": [1, 2]}, "session": str(1 << 60)}
    assert decoded["front_end"] == {"open": 2}


def test_fields_of_a_newer_client_are_named_not_ignored() -> None:
    message = pb.GenerateRequest(text="hi")
    message.sampling.temperature = 0.5
    wire = message.SerializeToString() + b"\xf8\x07\x01"  # field 127
    newer = pb.GenerateRequest.FromString(wire)
    assert codec.decode_generate_request(newer, None).not_implemented == ("GenerateRequest field 127",)
    inner = pb.GenerateRequest(sampling=pb.Sampling.FromString(b"\xf8\x07\x01"))
    assert codec.decode_generate_request(inner, None).not_implemented == ("Sampling field 127",)


@pytest.mark.parametrize("first", ["protos.slipstream_pb2", "smg_grpc_proto.generated.vllm_engine_pb2"])
def test_both_protocols_live_in_one_process(first: str) -> None:
    code = f"import {first}, protos.slipstream_pb2, smg_grpc_proto.generated.vllm_engine_pb2"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_client_does_not_need_the_router_s_protos() -> None:
    code = "import cluster.client, sys; assert not [name for name in sys.modules if name.startswith('smg')]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    generate(tmp_path)
    for stub in STUBS:
        assert (tmp_path / stub).read_text() == (ROOT / stub).read_text(), f"run `python -m protos.generate`: {stub}"
