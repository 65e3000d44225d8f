"""The service vllm.grpc.engine.VllmEngine (of smg-grpc-proto), which the smg router and others speak.

Token ids in, token ids out: routers of this protocol tokenize and detokenize themselves, so text is
made here only to find stop strings. What is not implemented answers UNIMPLEMENTED.
"""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from cluster import kv_event_service
from cluster.call import Call, StreamError
from cluster.choice import Finish, Logprobs, Output
from cluster.codec import unknown_fields
from cluster.serving import Serving, State
from cluster.status import refuse, timeout_of, traceparent_of
from cluster.validate import ClientRequest, ClientSampling

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json"),
)
TOKENIZER_PATTERNS = ("*.model", "*.tiktoken", "*.jinja")
# Fields whose presence asks for something nothing here does.
UNSUPPORTED_REQUEST = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs")
UNSUPPORTED_SAMPLING = ("prompt_logprobs", "truncate_prompt_tokens")


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """One worker, as a router of this protocol sees the whole deployment."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._bundle: Bundle | None = None
        self._last_count = (time.monotonic(), 0)  # when, and how many tokens had been generated
        self._throughput = 0.0

    async def Generate(self, message: Any, context: Any) -> None:
        """Chunks with new tokens, then one complete message per choice; without `stream` only the latter."""
        try:
            request = decode_request(message, timeout_of(context))
            call = await self._serving.open(request, traceparent=traceparent_of(context))
            await self._stream(call, message.stream, context)
        except (ValueError, StreamError) as error:
            await refuse(context, error)

    async def _stream(self, call: Call, stream: bool, context: Any) -> None:
        whole = [Whole(len(call.request.prompt_token_ids), index) for index in range(call.request.n)]
        async with aclosing(self._serving.front_end.outputs(call)) as outputs:
            async for output in outputs:
                choice = whole[output.index]
                choice.add(output)
                if stream and output.token_ids:
                    await self._serving.write(context, choice.chunk(output))
                if output.finish is not None:
                    await self._serving.write(context, choice.complete(output.finish))

    async def Abort(self, message: Any, context: Any) -> Any:
        """Ends requests; those unknown or ended are fine."""
        await asyncio.gather(*map(self._serving.cancel, message.request_ids))
        return pb.AbortResponse()

    async def HealthCheck(self, message: Any, context: Any) -> Any:
        """Healthy while requests are taken and the scheduler answers."""
        why_not = await self._serving.why_not_ready()
        return pb.HealthCheckResponse(healthy=why_not is None, message=why_not or "serving")

    async def GetModelInfo(self, message: Any, context: Any) -> Any:
        """The model's names, limits and special tokens."""
        model = self._serving.model
        return pb.GetModelInfoResponse(
            model_path=model.path,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=model.path,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
            max_req_input_len=model.max_model_len - 1,
            default_sampling_params_json=json.dumps(model.sampling_defaults) if model.sampling_defaults else "",
        )

    async def GetServerInfo(self, message: Any, context: Any) -> Any:
        """What runs here."""
        serving = self._serving
        return pb.GetServerInfoResponse(
            active_requests=serving.front_end.num_open_requests,
            is_paused=serving.state is not State.SERVING,
            last_receive_timestamp=serving.last_request_s,
            uptime_seconds=time.monotonic() - serving.started_s,
            server_type="slipstream-grpc",
            data_parallel_size=1,  # the scheduler balances over its workers by itself
            block_size=serving.model.block_size,
            model_dtype=serving.model.dtype,
            max_num_seqs=serving.model.max_num_seqs,
        )

    async def GetLoads(self, message: Any, context: Any) -> Any:
        """One load for the whole deployment."""
        try:
            stats = await self._serving.front_end.scheduler_stats()
        except ConnectionError as error:
            await refuse(context, error)
        load = self._load(stats)
        wanted = [load] if not message.HasField("dp_rank") or message.dp_rank == 0 else []
        timestamp = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=timestamp, version=self._serving.version, dp_rank_count=1, loads=wanted)

    async def GetTokenizer(self, message: Any, context: Any) -> None:
        """The tokenizer's files as a zip archive in chunks, its sha256 on the last."""
        path = self._serving.model.path
        if not path:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this model has no tokenizer files")
        if self._bundle is None:
            self._bundle = await asyncio.to_thread(bundle, Path(path))
        archive = self._bundle.archive
        for start in range(0, len(archive), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(archive)
            chunk = archive[start : start + CHUNK_BYTES]
            await context.write(common_pb2.GetTokenizerChunk(data=chunk, sha256=self._bundle.sha256 if last else ""))

    async def Embed(self, message: Any, context: Any) -> None:
        """Not implemented, like the rest below."""
        await _unimplemented(context)

    async def FlushCache(self, message: Any, context: Any) -> None:
        """Not implemented; slipstream.v1.Admin.ResetPrefixCache does it."""
        await _unimplemented(context)

    async def StartProfile(self, message: Any, context: Any) -> None:
        """Not implemented."""
        await _unimplemented(context)

    async def StopProfile(self, message: Any, context: Any) -> None:
        """Not implemented."""
        await _unimplemented(context)

    async def SubscribeKvEvents(self, message: Any, context: Any) -> None:
        """Snapshot and changes of what the prefix caches hold."""
        try:
            await kv_event_service.follow(self._serving, message.start_sequence_number, context)
        except (StreamError, ConnectionError) as error:
            await refuse(context, error)

    def _load(self, stats: dict[str, Any]) -> Any:
        model, workers = self._serving.model, stats.get("workers", ())
        num_blocks = sum(worker["num_blocks"] for worker in workers)
        num_used_blocks = num_blocks - sum(worker["num_free_blocks"] for worker in workers)
        running, waiting = stats.get("num_running", 0), stats.get("num_waiting", 0)
        queries, hits = stats.get("prefix_cache_queries", 0), stats.get("prefix_cache_hits", 0)
        return pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=num_used_blocks * model.block_size,
            max_total_num_tokens=num_blocks * model.block_size,
            token_usage=num_used_blocks / num_blocks if num_blocks else 0.0,
            gen_throughput=self._tokens_per_s(stats.get("num_generation_tokens", 0)),
            cache_hit_rate=hits / queries if queries else 0.0,
            utilization=running / model.max_num_seqs if model.max_num_seqs else 0.0,
            max_running_requests=model.max_num_seqs,
        )

    def _tokens_per_s(self, num_tokens: int) -> float:
        """Generated tokens per second since a call at least half a second ago."""
        now_s = time.monotonic()
        then_s, num_before = self._last_count
        if now_s - then_s >= 0.5:
            self._throughput = max(num_tokens - num_before, 0) / (now_s - then_s)
            self._last_count = now_s, num_tokens
        return self._throughput


class Whole:
    """Everything one choice has sent so far, which its complete message repeats."""

    def __init__(self, num_prompt_tokens: int, index: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._index = index
        self._token_ids: list[int] = []
        self._logprobs = pb.OutputLogProbs()

    def add(self, output: Output) -> None:
        """Takes one more output."""
        self._token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self._logprobs.MergeFrom(encode_logprobs(output.token_ids, output.logprobs))

    def chunk(self, output: Output) -> Any:
        """A GenerateResponse with the new tokens; counts are deltas, as routers of this protocol add them up."""
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(output.token_ids),
            index=self._index,
        )
        if output.logprobs is not None:
            chunk.output_logprobs.CopyFrom(encode_logprobs(output.token_ids, output.logprobs))
        return pb.GenerateResponse(chunk=chunk)

    def complete(self, finish: Finish) -> Any:
        """A GenerateResponse with all tokens and how the choice ended."""
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=finish.reason.value,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=finish.num_cached_tokens,
            index=self._index,
            matched_token_id=finish.stop_token_id,
            matched_stop_str=finish.stop_string,
            spec_accepted_tokens=finish.num_accepted_tokens,
            spec_draft_tokens=finish.num_draft_tokens,
        )
        if self._logprobs.token_ids:
            complete.output_logprobs.CopyFrom(self._logprobs)
        return pb.GenerateResponse(complete=complete)


def decode_request(message: Any, timeout_s: float | None) -> ClientRequest:
    """A pb.GenerateRequest as it came, unchecked. Its zero values mean "not set" where zero makes no sense."""
    params = message.sampling_params
    tokenized = message.WhichOneof("input") == "tokenized"
    return ClientRequest(
        request_id=message.request_id,
        prompt=list(message.tokenized.input_ids) if tokenized else message.text,
        sampling=_decode_sampling(params),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop=tuple(params.stop),
        include_stop_str=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        n=params.n or None,
        num_logprobs=params.logprobs if params.HasField("logprobs") else None,
        timeout_s=timeout_s,
        with_text=False,
        not_implemented=_not_implemented(message),
    )


def _decode_sampling(params: Any) -> ClientSampling:
    return ClientSampling(
        temperature=_shortest(params.temperature) if params.HasField("temperature") else None,
        top_p=_shortest(params.top_p) or None,
        top_k=params.top_k,
        min_p=_shortest(params.min_p),
        repetition_penalty=_shortest(params.repetition_penalty) or None,
        presence_penalty=_shortest(params.presence_penalty),
        frequency_penalty=_shortest(params.frequency_penalty),
        logit_bias=tuple((token_id, _shortest(bias)) for token_id, bias in params.logit_bias.items()),
        seed=params.seed % (1 << 64) if params.HasField("seed") else None,  # signed here
        stop_token_ids=tuple(params.stop_token_ids),
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
    )


def _shortest(value: float) -> float:
    """The decimal that was meant by a 32-bit float: 0.8, not 0.800000011920929.

    So a request means the same numbers, and gives the same stream, over either protocol.
    """
    return float(str(np.float32(value)))


def _not_implemented(message: Any) -> tuple[str, ...]:
    params = message.sampling_params
    found = [name for name in UNSUPPORTED_REQUEST if message.HasField(name)]
    found += ["extra_mm_inputs"] if message.extra_mm_inputs else []
    found += ["data_parallel_rank"] if message.data_parallel_rank > 0 else []
    found += [name for name in UNSUPPORTED_SAMPLING if params.HasField(name)]
    constraint = params.WhichOneof("constraint")
    found += [constraint] if constraint is not None else []
    return (*found, *unknown_fields(message))


def encode_logprobs(token_ids: tuple[int, ...], logprobs: Logprobs) -> Any:
    """A pb.OutputLogProbs of these tokens."""
    encoded = pb.OutputLogProbs(token_logprobs=logprobs.logprobs.tolist(), token_ids=token_ids)
    if logprobs.top_token_ids.shape[1]:
        encoded.top_logprobs.extend(
            pb.TopLogProbs(values=values, token_ids=ids)
            for values, ids in zip(logprobs.top_logprobs.tolist(), logprobs.top_token_ids.tolist(), strict=True)
        )
    return encoded


class Bundle(NamedTuple):
    """A tokenizer's files as a zip archive."""

    archive: bytes
    sha256: str  # hexadecimal, of the archive


def bundle(directory: Path) -> Bundle:
    """Zips the files that make a tokenizer. The same files give the same bytes."""
    paths = [directory / name for name in TOKENIZER_FILES]
    paths += [path for pattern in TOKENIZER_PATTERNS for path in directory.glob(pattern)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({path for path in paths if path.is_file()}):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return Bundle(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


async def _unimplemented(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not implemented by this server")
