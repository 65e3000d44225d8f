"""The promise through every layer but Ray: what a gRPC client reads is the undisturbed stream.

Real core, real runner on a tiny random model, a drafter that knows the truth and spoils some of it,
pipelined steps, deliveries that overtake each other.
"""

import asyncio
import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from cluster.call import choice_seed
from cluster.client import Answer, Generation
from scheduler.record import replay
from scheduler.request import FinishReason, SamplingParams
from tests.oracle import Stream, undisturbed
from tests.served import TINY
from tests.whole_stack import BLOCK_SIZE, MAX_MODEL_LEN, RECORD_EVENTS, Stack, model_of, whole_stack

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request and its undisturbed stream."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stream: Stream

    def send(self, stack: Stack, **options: Any) -> Generation:
        """The request, its continuation taught to the drafter."""
        request_id = options.pop("request_id", self.request_id)
        stack.drafter.learn({request_id: (*self.prompt, *self.stream.token_ids)})
        return stack.client.generate(
            self.prompt,
            request_id=request_id,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            **options,
        )


WHOLE_CHARACTER = tuple(TINY.encode("a").tolist())  # so that no output begins inside a character


@functools.cache
def asks() -> tuple[Ask, ...]:
    rng = random.Random(11)
    model = model_of("oracle", MAX_MODEL_LEN // BLOCK_SIZE)
    made = []
    for index in range(10):
        prompt = tuple(rng.randrange(3, 315) for _ in range(rng.randint(4, 40))) + WHOLE_CHARACTER
        temperature, seed, max_tokens = (0.0, 0.8)[index % 2], rng.getrandbits(64), rng.randint(30, 60)
        sampling = SamplingParams(temperature=temperature, seed=seed, num_logprobs=2)
        stream = undisturbed(model, prompt, sampling, max_tokens)
        made.append(
            Ask(
                request_id=f"r{index}",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stream=stream,
            )
        )
    return tuple(made)


def check(ask: Ask, answer: Answer) -> None:
    assert answer.token_ids == ask.stream.token_ids
    assert answer.text == TINY.decode(ask.stream.token_ids)
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.LENGTH


async def test_clients_read_undisturbed_streams_with_their_logprobs() -> None:
    async with whole_stack() as stack:
        answers = await asyncio.gather(*(ask.send(stack, logprobs=2).aresult() for ask in asks()))
        for ask, answer in zip(asks(), answers, strict=True):
            check(ask, answer)
            assert answer.logprobs == [one.logprob for one in ask.stream.logprobs]
        stats = await stack.idle()
        assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
        assert (
            sum(answer.finish.num_accepted_tokens for answer in answers if answer.finish)
            == (stats["num_accepted_tokens"])
        )


async def test_preemptions_and_resets_over_grpc_change_no_stream() -> None:
    async with whole_stack(num_blocks=40) as stack:
        running = asyncio.gather(*(ask.send(stack).aresult() for ask in asks()))
        for round_number in range(30):
            await asyncio.wait({running}, timeout=0.01)
            if running.done():
                break
            await stack.client.apreempt(f"r{round_number % len(asks())}")
            await stack.client.areset_prefix_cache(reset_running=round_number % 3 == 0)
        for ask, answer in zip(asks(), await running, strict=True):
            check(ask, answer)
        stats = await stack.idle()
        assert sum(stats["num_preemptions"].values()) > 0
        assert sum(stats["stale_tokens_dropped"].values()) > 0


async def test_the_router_s_protocol_gives_the_same_streams_and_counts_speculation() -> None:
    ask = asks()[1]
    async with whole_stack() as stack:
        request = vllm_pb.GenerateRequest(
            request_id="v",
            tokenized=vllm_pb.TokenizedInput(input_ids=ask.prompt),
            sampling_params=vllm_pb.SamplingParams(
                temperature=ask.temperature, seed=ask.seed % (1 << 31), max_tokens=ask.max_tokens, ignore_eos=True
            ),
            stream=True,
        )
        sampling = SamplingParams(temperature=ask.temperature, seed=ask.seed % (1 << 31))
        stream = undisturbed(model_of("oracle", MAX_MODEL_LEN // BLOCK_SIZE), ask.prompt, sampling, ask.max_tokens)
        stack.drafter.learn({"v": (*ask.prompt, *stream.token_ids)})
        call = vllm_engine_pb2_grpc.VllmEngineStub(stack.channel).Generate(request)
        *chunks, last = [response async for response in call]
        assert [token_id for response in chunks for token_id in response.chunk.token_ids] == stream.token_ids
        assert list(last.complete.output_ids) == stream.token_ids
        assert 0 < last.complete.spec_accepted_tokens < last.complete.spec_draft_tokens


async def test_a_killed_scheduler_is_a_pause_in_every_stream() -> None:
    async with whole_stack() as stack:
        started = asyncio.Event()

        async def read(ask: Ask) -> Answer:
            answer = Answer()
            async for output in ask.send(stack):
                answer.token_ids.extend(output.token_ids)
                answer.text += output.text
                answer.finish = output.finish
                if len(answer.token_ids) > 10:
                    started.set()
            return answer

        running = asyncio.gather(*map(read, asks()))
        await started.wait()
        await stack.kill_scheduler()
        await asyncio.wait({running}, timeout=0.02)
        assert not running.done()
        await stack.start_scheduler()
        for ask, answer in zip(asks(), await running, strict=True):
            check(ask, answer)


async def test_a_lost_front_end_is_a_pause_for_a_client_that_resumes() -> None:
    async with whole_stack() as stack:
        running = asyncio.gather(*(ask.send(stack, resume=True).aresult() for ask in asks()))
        for _ in range(3):
            await asyncio.wait({running}, timeout=0.05)
            stack.front_end.fail_open("a test")
        for ask, answer in zip(asks(), await running, strict=True):
            check(ask, answer)


async def test_trap_13_a_stop_string_inside_an_accepted_run_with_a_real_model() -> None:
    num_stops = 0
    async with whole_stack(num_drafts=6, spoil=0.0) as stack:
        for number, ask in enumerate(asks()):
            for cut in (7, 8, 9, 10):
                stop = TINY.decode(ask.stream.token_ids[cut : cut + 2])
                text = TINY.decode(ask.stream.token_ids)
                if len(stop) < 2 or "\ufffd" in stop or stop not in text:
                    continue
                sent = ask.send(stack, stop=stop, request_id=f"s{number}-{cut}", logprobs=0)
                answer = await sent.aresult()
                assert answer.text == text[: text.index(stop)]
                assert answer.token_ids == ask.stream.token_ids[: len(answer.token_ids)]
                assert stop in TINY.decode(answer.token_ids)
                assert stop not in TINY.decode(answer.token_ids[:-1])
                assert len(answer.logprobs) == len(answer.token_ids)
                assert answer.finish is not None
                assert (answer.finish.reason, answer.finish.stop_string) == (FinishReason.STOP, stop)
                num_stops += 1
    assert num_stops >= 10


async def test_n_choices_are_the_streams_of_their_seeds() -> None:
    model = model_of("oracle", MAX_MODEL_LEN // BLOCK_SIZE)
    async with whole_stack() as stack:
        answers = await stack.client.generate([5, 6, 7], n=3, seed=9, max_tokens=20, ignore_eos=True).aresults()
        for index, answer in enumerate(answers):
            sampling = SamplingParams(temperature=1.0, seed=choice_seed(9, index, 3))
            assert answer.token_ids == undisturbed(model, [5, 6, 7], sampling, 20).token_ids


async def test_trap_15_stops_over_grpc_with_a_real_model() -> None:
    async with whole_stack(num_drafts=6, spoil=0.0) as stack:
        ask = asks()[1]
        token_ids = ask.stream.token_ids
        stop_id = next(token_id for token_id in token_ids[5:] if token_id not in token_ids[:5])
        end = token_ids.index(stop_id) + 1
        answer = await ask.send(stack, stop_token_ids=[stop_id], request_id="stop").aresult()
        assert answer.token_ids == token_ids[:end]
        assert answer.text == TINY.decode(token_ids[: end - 1])
        assert answer.finish is not None
        assert (answer.finish.reason, answer.finish.stop_token_id) == (FinishReason.STOP, stop_id)


async def test_a_stream_left_or_cancelled_gives_every_block_back() -> None:
    async with whole_stack() as stack:
        for number, ask in enumerate(asks()):
            sent = ask.send(stack, request_id=f"left{number}")
            async for output in sent:
                if output.offset + len(output.token_ids) > 3 * number:
                    if number % 2:
                        break
                    await stack.client.acancel(sent.request_id)
        await stack.idle()


async def until_scheduler(stack: Stack, count: str) -> None:
    """Returns when that count of the scheduler is not 0."""
    async with asyncio.timeout(10):
        while not (await stack.client.astats())["scheduler"][count]:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


async def test_refusals_of_the_core_have_their_status() -> None:
    async with whole_stack(max_num_seqs=1, max_waiting=1, num_blocks=16) as stack:
        client = stack.client

        async def status(sent: Generation) -> Any:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sent.aresult()
            return caught.value.code()

        code = await status(client.generate([5] * 100, max_tokens=100))
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # beyond the pool of 128 tokens
        first = asyncio.create_task(client.generate([5], request_id="a", max_tokens=100, ignore_eos=True).aresult())
        await until_scheduler(stack, "num_running")
        second = asyncio.create_task(client.generate([6], request_id="b", max_tokens=5).aresult())
        await until_scheduler(stack, "num_waiting")
        assert await status(client.generate([7], max_tokens=5)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status(client.generate([7], request_id="b", max_tokens=5)) is grpc.StatusCode.ALREADY_EXISTS
        assert await client.acancel("a")
        await asyncio.gather(first, second)


async def test_a_deadline_cancels_in_the_core() -> None:
    async with whole_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.client.generate([5], max_tokens=250, ignore_eos=True, timeout_s=0.05).aresult()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        stats = await stack.idle()
        assert stats["num_finished"].get("deadline", 0) + stats["num_finished"].get("abort", 0) == 1


async def test_recorded_scheduler_is_replayed_to_identical_commands(tmp_path: Path) -> None:
    async with whole_stack() as stack:
        await asyncio.gather(*(stack.client.generate([5, 6, 7 + i], max_tokens=40).aresult() for i in range(3)))
        content = await asyncio.to_thread(stack.client.recording)
    path = tmp_path / "scheduler.recording"
    path.write_bytes(content)
    num_events, divergence, scheduler = replay(path)
    assert 0 < num_events <= RECORD_EVENTS
    assert divergence is None
    scheduler.check()
