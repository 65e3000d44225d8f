"""A client of slipstream.v1: `Client`, whose streams are read with `for` or with `async for`.

    with Client("127.0.0.1:50051") as client:
        for output in client.generate("Once upon a time", max_tokens=64):
            print(output.text, end="")

A stream may be told to resume: when the server goes away it is asked for again, from the tokens
received so far, and the reader sees a pause at most.
"""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from cluster import codec
from cluster.choice import Finish, Output
from cluster.codec import Received, Start
from cluster.text import ChatMessage
from cluster.tls import channel_credentials
from cluster.validate import ClientRequest, ClientSampling
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc

Message = ChatMessage | Mapping[str, str]

CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
FIRST_PAUSE_S = 0.1  # before a stream is resumed; doubles while nothing arrives
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True, eq=False)
class Answer:
    """One choice, whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of token_ids, when asked for
    finish: Finish | None = None


class Generation:
    """One request's stream. Iterate it once, with `for` or `async for`; each item is what became ready.

    Raises grpc.RpcError. Leaving the loop early cancels the request.
    """

    def __init__(self, client: "Client", request: ClientRequest, *, resume: bool, resume_timeout_s: float) -> None:
        self.request_id = request.request_id
        self.seed = request.sampling.seed  # as given, or as the server drew it once the stream has begun
        self.starts: dict[int, Start] = {}  # by choice
        self._client = client
        self._request = request
        if resume and (request.n or 1) > 1:
            raise ValueError(f"resume needs n = 1, got n = {request.n}")
        self._resume = resume
        self._resume_timeout_s = resume_timeout_s
        self._deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        self._token_ids = list(request.resume_token_ids)
        self._num_characters: int | None = None  # of text seen; None before the first message
        self.num_repeated_tokens = 0  # that came again, and were dropped
        self._num_finished = 0
        self._ended = False
        self._silent_since_s = time.monotonic()
        self._pause_s = FIRST_PAUSE_S

    def __iter__(self) -> Generator[Output, None, None]:
        while not self._ended:
            call = self._client.stub().Generate(
                self._attempt(), timeout=self._timeout_s(), metadata=self._client.metadata()
            )
            try:
                for message in call:
                    yield from self._taken(codec.decode_received(message))
                self._ended = True
            except grpc.RpcError as error:
                time.sleep(self._pause_after(error))
            finally:
                call.cancel()

    async def __aiter__(self) -> AsyncGenerator[Output, None]:
        while not self._ended:
            call = self._client.async_stub().Generate(
                self._attempt(), timeout=self._timeout_s(), metadata=self._client.metadata()
            )
            try:
                async for message in call:
                    for output in self._taken(codec.decode_received(message)):
                        yield output
                self._ended = True
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause_after(error))
            finally:
                call.cancel()

    def result(self) -> Answer:
        """Reads the stream to its end: the first choice."""
        return self.results()[0]

    def results(self) -> list[Answer]:
        """Reads the stream to its end: every choice."""
        answers = self._answers()
        for output in self:
            _append(answers[output.index], output)
        return answers

    async def aresult(self) -> Answer:
        """`result`, asynchronously."""
        return (await self.aresults())[0]

    async def aresults(self) -> list[Answer]:
        """`results`, asynchronously."""
        answers = self._answers()
        async for output in self:
            _append(answers[output.index], output)
        return answers

    def _answers(self) -> list[Answer]:
        return [Answer() for _ in range(self._request.n or 1)]

    def _attempt(self) -> Any:
        return codec.encode_generate_request(self._request)

    def _timeout_s(self) -> float | None:
        return None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)

    def _taken(self, received: Received) -> Iterable[Output]:
        """Lets through what is new: a resumed stream may repeat what was delivered before."""
        self._silent_since_s, self._pause_s = time.monotonic(), FIRST_PAUSE_S
        output = received.output
        self._num_finished += output.finish is not None
        if received.start is not None:
            self.starts[output.index] = received.start
            self.seed = received.start.seed
        if not self._resume:
            return [output]
        new = self._without_repeats(output)
        return [new] if new.token_ids or new.text or new.finish else []

    def _without_repeats(self, output: Output) -> Output:
        skip = len(self._token_ids) - output.offset
        if skip < 0:
            raise ValueError(f"output {output.offset} came after {len(self._token_ids)} tokens")
        self.num_repeated_tokens += min(skip, len(output.token_ids))
        skip_text = 0 if self._num_characters is None else self._num_characters - output.text_offset
        if skip_text < 0:
            raise ValueError(f"text at {output.text_offset} came after {self._num_characters} characters")
        new = replace(output, token_ids=output.token_ids[skip:], text=output.text[skip_text:])
        if skip or skip_text:
            new = replace(new, offset=output.offset + skip, text_offset=output.text_offset + skip_text)
        self._token_ids.extend(new.token_ids)
        self._num_characters = new.text_offset + len(new.text)
        return new

    def _pause_after(self, error: grpc.RpcError) -> float:
        """Prepares the next attempt; how long to wait before it. Raises the error when there is none."""
        if self._num_finished == (self._request.n or 1):  # only the status was lost
            self._ended = True
            return 0.0
        silent_s = time.monotonic() - self._silent_since_s
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        if not self._resume or not unavailable or silent_s > self._resume_timeout_s:
            raise error
        sampling = replace(self._request.sampling, seed=self.seed)
        self._request = replace(
            self._request,
            attempt=self._request.attempt + 1,
            sampling=sampling,
            resume_token_ids=tuple(self._token_ids),
            resume_fingerprint=self._fingerprint(),
        )
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def _fingerprint(self) -> str | None:
        """Of the numbers the tokens received so far were computed with."""
        start = self.starts.get(0)
        return start.fingerprint if start is not None else self._request.resume_fingerprint


class Client:
    """A connection to one server, for threads and for asyncio. Methods with an `a` before their name are awaited."""

    def __init__(
        self,
        address: str,
        *,
        tls: bool = False,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        token: str | None = None,
    ) -> None:
        """`address`: HOST:PORT, or several IPv4 ones with commas between: the first that answers is used.

        TLS with `tls` or any of the PEM files: whom to trust, this client's certificate and its key.

        `token` goes with every call; a new one may be assigned at any time. Raises ValueError for files that
        cannot be read.
        """
        self.address = address
        self._target = f"ipv4:{address}" if "," in address else address
        self.token = token
        secure = tls or any((ca, cert, key))
        self._credentials: Any = _credentials(ca, cert, key) if secure else None
        self._lock = threading.Lock()
        self._channel: Any = None
        self._stub: Any = None
        self._admin: Any = None
        self._async_loop: asyncio.AbstractEventLoop | None = None
        self._async_channel: Any = None
        self._async_stub: Any = None
        self._async_admin: Any = None

    # ---- streams ----

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        *,
        request_id: str = "",
        model: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int | None = None,
        ignore_eos: bool = False,
        n: int | None = None,
        logprobs: int | None = None,
        max_drafts: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        resume_token_ids: Sequence[int] = (),
        resume: bool = False,
        resume_timeout_s: float = 30.0,
    ) -> Generation:
        """A request for a text, token ids or a conversation; sent when the result is iterated.

        `resume` continues on UNAVAILABLE until nothing has arrived for `resume_timeout_s`.
        """
        sampling = ClientSampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple((logit_bias or {}).items()),
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
        )
        request = ClientRequest(
            request_id=request_id or uuid.uuid4().hex,
            model=model,
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop_str=include_stop_str,
            skip_special_tokens=skip_special_tokens,
            n=n,
            num_logprobs=logprobs,
            max_drafts=max_drafts,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            tenant=tenant,
            resume_token_ids=tuple(resume_token_ids),
        )
        return Generation(self, request, resume=resume, resume_timeout_s=resume_timeout_s)

    def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """The next turn of a conversation, given as ChatMessages or {"role", "content"}; options as in `generate`."""
        turns = [
            m if isinstance(m, ChatMessage) else ChatMessage(role=m["role"], content=m["content"]) for m in messages
        ]
        return self.generate(turns, **options)

    # ---- single calls ----

    def cancel(self, request_id: str) -> bool:
        """Ends a request; False when the server did not know it."""
        return bool(self.stub().Cancel(pb.CancelRequest(request_id=request_id), metadata=self.metadata()).found)

    async def acancel(self, request_id: str) -> bool:
        """`cancel`, asynchronously."""
        return bool(
            (await self.async_stub().Cancel(pb.CancelRequest(request_id=request_id), metadata=self.metadata())).found
        )

    def stats(self) -> dict[str, Any]:
        """`{"scheduler": {...}, "front_end": {...}}`."""
        return codec.decode_stats(self.admin().Stats(pb.StatsRequest(), metadata=self.metadata()))

    async def astats(self) -> dict[str, Any]:
        """`stats`, asynchronously."""
        return codec.decode_stats(await self.async_admin().Stats(pb.StatsRequest(), metadata=self.metadata()))

    def reset_prefix_cache(self, *, reset_running: bool = False) -> None:
        """Empties the prefix cache, with `reset_running` the KV of running requests too."""
        self.admin().ResetPrefixCache(pb.ResetPrefixCacheRequest(reset_running=reset_running), metadata=self.metadata())

    async def areset_prefix_cache(self, *, reset_running: bool = False) -> None:
        """`reset_prefix_cache`, asynchronously."""
        await self.async_admin().ResetPrefixCache(
            pb.ResetPrefixCacheRequest(reset_running=reset_running), metadata=self.metadata()
        )

    def preempt(self, request_id: str) -> None:
        """Takes a running request off its worker; its stream goes on."""
        self.admin().Preempt(pb.PreemptRequest(request_id=request_id), metadata=self.metadata())

    async def apreempt(self, request_id: str) -> None:
        """`preempt`, asynchronously."""
        await self.async_admin().Preempt(pb.PreemptRequest(request_id=request_id), metadata=self.metadata())

    def swap_weights(self, directory: str) -> None:
        """Goes on with the weights of another checkpoint, a directory of the workers' machines."""
        self.admin().SwapWeights(pb.SwapWeightsRequest(directory=directory), metadata=self.metadata())

    async def aswap_weights(self, directory: str) -> None:
        """`swap_weights`, asynchronously."""
        await self.async_admin().SwapWeights(pb.SwapWeightsRequest(directory=directory), metadata=self.metadata())

    async def astory(self, request_id: str) -> str:
        """What the scheduler remembers of a request, line by line."""
        return str(
            (await self.async_admin().Story(pb.StoryRequest(request_id=request_id), metadata=self.metadata())).text
        )

    def view(self, after: int = 0, *, frames: bool = False) -> dict[str, Any]:
        """What the live page draws, with the steps that changed since an earlier answer's `trail.number`."""
        answer = self.admin().View(pb.ViewRequest(after=after, frames=frames), metadata=self.metadata())
        view: dict[str, Any] = json.loads(answer.json)
        return view

    async def aview(self, after: int = 0, *, frames: bool = False) -> dict[str, Any]:
        """`view`, asynchronously."""
        request = pb.ViewRequest(after=after, frames=frames)
        view: dict[str, Any] = json.loads((await self.async_admin().View(request, metadata=self.metadata())).json)
        return view

    def recording(self) -> bytes:
        """The scheduler's log, as a file for `slipstream replay`."""
        parts = self.admin().Record(pb.RecordRequest(), metadata=self.metadata())
        return b"".join(part.content for part in parts)

    # ---- connections, made when first needed ----

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call; pass it when calling a stub directly."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def stub(self) -> Any:
        """The Inference service, for threads."""
        self._connect()
        return self._stub

    def admin(self) -> Any:
        """The Admin service, for threads."""
        self._connect()
        return self._admin

    def async_stub(self) -> Any:
        """The Inference service, for the running event loop."""
        self._connect_async()
        return self._async_stub

    def async_admin(self) -> Any:
        """The Admin service, for the running event loop."""
        self._connect_async()
        return self._async_admin

    def close(self) -> None:
        """Closes what threads used."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    async def aclose(self) -> None:
        """Closes everything."""
        self.close()
        if self._async_channel is not None and self._async_loop is asyncio.get_running_loop():
            await self._async_channel.close()
        self._async_channel = None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _connect(self) -> None:
        with self._lock:
            if self._channel is None:
                self._channel = self._open(grpc.insecure_channel, grpc.secure_channel)
                self._stub = slipstream_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
                self._admin = slipstream_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]

    def _connect_async(self) -> None:
        loop = asyncio.get_running_loop()
        if self._async_channel is None or self._async_loop is not loop:
            self._async_loop = loop
            self._async_channel = self._open(grpc.aio.insecure_channel, grpc.aio.secure_channel)
            self._async_stub = slipstream_pb2_grpc.InferenceStub(self._async_channel)  # type: ignore[no-untyped-call]
            self._async_admin = slipstream_pb2_grpc.AdminStub(self._async_channel)  # type: ignore[no-untyped-call]

    def _open(self, insecure: Callable[..., Any], secure: Callable[..., Any]) -> Any:
        if self._credentials is None:
            return insecure(self._target, options=CHANNEL_OPTIONS)
        return secure(self._target, self._credentials, options=CHANNEL_OPTIONS)


def _credentials(ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> Any:
    found = [None if path is None else Path(path) for path in (ca, cert, key)]
    return channel_credentials(ca=found[0], cert=found[1], key=found[2])


def _append(answer: Answer, output: Output) -> None:
    answer.text += output.text
    answer.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        answer.logprobs.extend(output.logprobs.logprobs.tolist())
    answer.finish = output.finish or answer.finish
