"""vllm.grpc.engine.VllmEngine over a real server and channel on loopback."""

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from cluster.call import choice_seed
from cluster.served_model import ServedModel
from tests import tiny_tokenizer
from tests.fake_link import FakeLink, expected_tokens
from tests.served import TINY, Served, rest_of, served, tiny_model

PROMPT = [10, 20, 30]


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


def stub(up: Served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(up.channel)


def asked(*, stream: bool = True, request_id: str = "r", **sampling: Any) -> Any:
    sampling.setdefault("max_tokens", 12)
    sampling.setdefault("seed", 7)
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="not looked at", input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def read(up: Served, message: Any) -> list[Any]:
    return [response async for response in stub(up).Generate(message)]


async def test_chunks_then_a_complete_message_with_the_speculation_counts(up: Served) -> None:
    *chunks, last = await read(up, asked())
    token_ids = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert token_ids == expected_tokens(PROMPT, 7, 12) == list(last.complete.output_ids)
    assert sum(response.chunk.completion_tokens for response in chunks) == 12
    complete = last.complete
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 12)
    assert (complete.spec_accepted_tokens, complete.spec_draft_tokens, complete.cached_tokens) == (5, 9, 16)


async def test_without_stream_there_is_one_message_per_choice(up: Served) -> None:
    responses = await read(up, asked(stream=False, n=2))
    assert [response.WhichOneof("response") for response in responses] == ["complete", "complete"]
    for response in responses:
        seed = choice_seed(7, response.complete.index, 2)
        assert list(response.complete.output_ids) == expected_tokens(PROMPT, seed, 12)


async def test_zero_values_of_raw_clients_mean_not_set(up: Served) -> None:
    message = pb.GenerateRequest(request_id="z", tokenized=pb.TokenizedInput(input_ids=PROMPT), stream=True)
    message.sampling_params.max_tokens = 4
    await read(up, message)
    [request] = up.link.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)


async def test_numbers_mean_the_same_as_over_the_other_protocol(up: Served) -> None:
    await read(up, asked(temperature=0.8, top_p=0.95, min_p=0.05, presence_penalty=0.1, logit_bias={5: 0.3}))
    sampling = up.link.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty) == (0.8, 0.95, 0.05, 0.1)
    assert sampling.logit_bias == ((5, 0.3),)


async def test_text_is_taken_too(up: Served) -> None:
    message = pb.GenerateRequest(request_id="t", text="hello world", stream=True)
    message.sampling_params.max_tokens = 4
    await read(up, message)
    assert up.link.submitted[0].prompt_token_ids.tolist() == TINY.encode("hello world").tolist()


async def test_a_negative_seed_is_a_seed(up: Served) -> None:
    await read(up, asked(seed=-1))
    assert up.link.submitted[0].sampling.seed == (1 << 64) - 1


async def test_logprobs_come_as_deltas_and_whole(up: Served) -> None:
    *chunks, last = await read(up, asked(logprobs=2))
    whole = last.complete.output_logprobs
    assert list(whole.token_ids) == list(last.complete.output_ids)
    assert list(whole.token_logprobs) == pytest.approx([-t / 1000 for t in whole.token_ids])
    assert [len(top.values) for top in whole.top_logprobs] == [2] * 12
    assert sum(len(response.chunk.output_logprobs.token_ids) for response in chunks) == 12


async def test_trap_13_stop_strings_end_ids_and_are_named() -> None:
    script = TINY.encode("hello, world. the lazy dog jumps").tolist()
    async with served(FakeLink(script=script)) as up:
        [response] = await read(up, asked(stream=False, stop=[". t"], max_tokens=20))
        complete = response.complete
        assert complete.WhichOneof("matched_stop") == "matched_stop_str"
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", ". t")
        assert ". t" in TINY.decode(list(complete.output_ids))
        assert ". t" not in TINY.decode(list(complete.output_ids)[:-1])
        assert complete.spec_draft_tokens == 9


async def test_trap_15_a_matched_stop_id_is_named_and_an_eos_is_not() -> None:
    async with served(FakeLink(script=[10, 42, 12, 2])) as up:
        [stopped] = await read(up, asked(stream=False, stop_token_ids=[42]))
        assert stopped.complete.matched_token_id == 42
        assert list(stopped.complete.output_ids) == [10, 42]
        [ended] = await read(up, asked(stream=False))
        assert ended.complete.finish_reason == "stop"
        assert ended.complete.WhichOneof("matched_stop") is None
        assert list(ended.complete.output_ids) == [10, 42, 12, 2]


def with_fields(**fields: Any) -> Any:
    message = asked()
    for name, value in fields.items():
        if isinstance(value, str | int):
            setattr(message, name, value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            getattr(message, name).CopyFrom(value)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (asked(json_schema="{}"), "json_schema"),
        (asked(regex="a"), "regex"),
        (asked(grammar="root ::= x"), "grammar"),
        (asked(structural_tag="x"), "structural_tag"),
        (asked(json_object=True), "json_object"),
        (asked(choice=pb.ChoiceConstraint(choices=["a"])), "choice"),
        (asked(prompt_logprobs=1), "prompt_logprobs"),
        (asked(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        (with_fields(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (with_fields(extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (with_fields(media_refs=pb.MediaRefs()), "media_refs"),
        (with_fields(kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
        (with_fields(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (with_fields(data_parallel_rank=1), "data_parallel_rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_implemented_is_refused_by_name(up: Served, message: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(up, message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{field}: not implemented" in str(caught.value.details())
    assert up.link.submitted == []


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1.0}, "temperature must be in"),
        ({"temperature": float("nan")}, "temperature must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"logprobs": -1}, "logprobs must be in"),
        ({"n": 1000}, "n must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 1000}, "max_model_len 256"),
        ({"stop_token_ids": [9999]}, "outside the vocabulary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_invalid_argument(up: Served, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await read(up, asked(**sampling))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_other_methods_are_unimplemented(up: Served, method: str, message: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub(up), method)(message)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_services_of_other_engines_are_unimplemented(up: Served) -> None:
    probe = up.channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await probe(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_abort_is_idempotent(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(request_id="a", max_tokens=250))
    await call.read()
    for _ in range(2):
        await stub(up).Abort(pb.AbortRequest(request_ids=["a", "never"]))
    last = (await rest_of(call))[-1]
    assert last.complete.finish_reason == "abort"
    assert up.link.live == {}


async def test_cancelling_the_rpc_cancels_in_the_scheduler(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(max_tokens=250))
    await call.read()
    call.cancel()
    await up.gone()


async def test_health_tells_of_a_scheduler_that_is_away(up: Served) -> None:
    assert (await stub(up).HealthCheck(pb.HealthCheckRequest())).healthy
    up.link.available = False
    health = await stub(up).HealthCheck(pb.HealthCheckRequest())
    assert not health.healthy
    assert "scheduler" in health.message
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(up).GetLoads(pb.GetLoadsRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_model_and_server_tell_about_themselves(tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path)
    config = {"vocab_size": 315, "max_position_embeddings": 512, "model_type": "llama", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "top_k": 40}))
    model = ServedModel.from_directory(tmp_path, name="tiny", max_num_seqs=8, dtype="bfloat16")
    async with served(model=model) as up:
        info = await stub(up).GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_path, info.tokenizer_path) == ("tiny", str(tmp_path), str(tmp_path))
        assert (info.max_context_length, info.vocab_size, info.is_generation) == (512, 315, True)
        assert list(info.eos_token_ids) == [2, 0]
        assert json.loads(info.default_sampling_params_json) == {"top_k": 40}
        server = await stub(up).GetServerInfo(pb.GetServerInfoRequest())
        assert (server.block_size, server.max_num_seqs, server.model_dtype) == (16, 8, "bfloat16")
        assert server.uptime_seconds > 0
        assert not server.is_paused


async def test_loads_are_those_of_the_scheduler(up: Served) -> None:
    loads = await stub(up).GetLoads(pb.GetLoadsRequest())
    [load] = loads.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 0, 0)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (400, 1600, 0.25)
    assert load.max_running_requests == 8
    assert not (await stub(up).GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads


async def test_the_tokenizer_comes_as_a_zip_with_its_hash(tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights are not sent")
    async with served(model=tiny_model(path=str(tmp_path))) as up:
        chunks = [chunk async for chunk in stub(up).GetTokenizer(common_pb2.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
        assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
        names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
        assert names == ["tokenizer.json", "tokenizer_config.json"]


async def test_a_model_without_files_has_no_tokenizer_to_send(up: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub(up).GetTokenizer(common_pb2.GetTokenizerRequest()):
            pass
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_both_protocols_give_the_same_stream(up: Served) -> None:
    [response] = await read(up, asked(stream=False, temperature=0.8))
    answer = await up.client.generate(PROMPT, max_tokens=12, seed=7, temperature=0.8).aresult()
    assert list(response.complete.output_ids) == answer.token_ids
    first, second = up.link.submitted
    assert first.sampling == second.sampling
