"""The front end lets each token through once and in order, whatever the way to the scheduler does."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.call import Call, StreamError, TextRequest, choice_seed
from cluster.choice import Finish, Output
from cluster.deliveries import InOrder
from cluster.frontend import MAX_RESUBMISSIONS, FrontEnd
from scheduler.events import Seated
from scheduler.request import FinishReason, Request, SamplingParams
from tests import tiny_tokenizer
from tests.fake_link import FakeLink, emit, expected_tokens

PROMPT = (10, 20, 30)
TINY = tiny_tokenizer.tiny()


def connected(link: FakeLink, **options: Any) -> FrontEnd:
    front_end = FrontEnd(link, tokenizer=TINY, **options)
    link.front_end = front_end
    return front_end


def asked(request_id: str = "r", *, max_tokens: int = 12, seed: int | None = 7, **options: Any) -> TextRequest:
    options.setdefault("sampling", SamplingParams())
    resume = np.asarray(options.pop("resume_token_ids", ()), np.int32)
    return TextRequest(
        request_id=request_id,
        prompt_token_ids=np.asarray(PROMPT, np.int32),
        resume_token_ids=resume,
        max_tokens=max_tokens,
        seed=seed,
        **options,
    )


class Reader:
    """Reads a call as its task gets to run."""

    def __init__(self, front_end: FrontEnd, call: Call) -> None:
        self.outputs: list[Output] = []
        self.error: StreamError | None = None
        self._task = asyncio.create_task(self._read(front_end, call))

    async def done(self) -> None:
        async with asyncio.timeout(5):
            await self._task

    def leave(self) -> None:
        self._task.cancel()

    def token_ids(self, index: int = 0) -> list[int]:
        """Checks that offsets leave no gap and no repeat."""
        taken: list[int] = []
        for output in self.outputs:
            if output.index == index:
                taken.extend(output.token_ids)
        return taken

    def text(self) -> str:
        text = ""
        for output in self.outputs:
            assert output.text_offset == len(text)
            text += output.text
        return text

    def finish(self, index: int = 0) -> Finish:
        [finish] = [output.finish for output in self.outputs if output.index == index and output.finish is not None]
        return finish

    async def _read(self, front_end: FrontEnd, call: Call) -> None:
        try:
            async with aclosing(front_end.outputs(call)) as outputs:
                async for output in outputs:
                    self.outputs.append(output)
        except StreamError as error:
            self.error = error


async def settled() -> None:
    """Every task that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def steps(link: FakeLink, count: int) -> None:
    for _ in range(count):
        await settled()
        link.step()
    await settled()


async def test_a_stream_carries_every_token_once_with_its_offset() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 8)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)
    assert [output.offset for output in reader.outputs] == [0, 1, 4, 6, 7, 10]
    assert reader.finish().reason is FinishReason.LENGTH
    assert reader.text() == TINY.decode(reader.token_ids())
    assert link.cancelled == []
    assert front_end.num_open_requests == 0


async def test_what_is_ready_is_one_message_per_stream() -> None:
    link = FakeLink()
    front_end = connected(link)
    call = front_end.open(asked())
    await settled()
    for _ in range(4):
        link.step()
    reader = Reader(front_end, call)
    await settled()
    assert len(reader.outputs) == 1
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 7)
    reader.leave()


async def test_deliveries_that_overtake_each_other_are_put_in_order() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await settled()
    link.held = []
    await steps(link, 4)
    assert reader.outputs == []
    link.release_reversed()
    await steps(link, 8)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)
    assert len(link.submitted) == 1


async def test_a_repeated_delivery_changes_nothing() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    first = emit(link.submitted[0], 0, expected_tokens(PROMPT, 7, 4))
    front_end.deliver(0, [first], link.life)
    front_end.deliver(2, [first], link.life)  # the same tokens under a number not seen before
    link.next_seq += 1
    await steps(link, 8)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)


async def test_a_gap_in_offsets_resubmits_with_the_tokens_so_far() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    front_end.deliver(2, [emit(link.submitted[0], 9, [50, 51])], link.life)
    link.next_seq += 1
    await steps(link, 10)
    await reader.done()
    again = link.submitted[1]
    assert (again.attempt, again.stream != link.submitted[0].stream) == (1, True)
    assert again.resume_token_ids.tolist() == expected_tokens(PROMPT, 7, 4)
    assert again.sampling.seed == link.submitted[0].sampling.seed
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)


async def test_tokens_of_an_attempt_left_behind_are_dropped() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    old = link.submitted[0]
    front_end.deliver(2, [emit(old, 9, [50]), emit(old, 4, [60, 61, 62])], link.life)
    link.next_seq += 1
    await steps(link, 10)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)
    assert front_end.stats()["num_stale_tokens"] == 3


async def test_a_lost_delivery_is_repaired_after_a_while() -> None:
    link = FakeLink()
    front_end = connected(link, gap_timeout_s=0.01)
    link.lose = {1, 4}
    reader = Reader(front_end, front_end.open(asked(max_tokens=30)))
    running = asyncio.create_task(link.run())
    await reader.done()
    running.cancel()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 30)
    assert len(link.submitted) > 1


async def test_a_lost_end_is_noticed_by_the_next_delivery() -> None:
    link = FakeLink()
    front_end = connected(link, gap_timeout_s=0.01)
    link.lose = {1}
    short = Reader(front_end, front_end.open(asked("short", max_tokens=2)))
    long = Reader(front_end, front_end.open(asked("long", max_tokens=30)))
    running = asyncio.create_task(link.run())
    await short.done()
    await long.done()
    running.cancel()
    assert short.token_ids() == expected_tokens(PROMPT, 7, 2)
    assert long.token_ids() == expected_tokens(PROMPT, 7, 30)


async def test_an_end_that_counts_more_tokens_than_came_is_not_believed() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked(max_tokens=2)))
    await settled()
    [live] = link.live.values()
    live.token_ids.extend(expected_tokens(PROMPT, 7, 2))
    front_end.deliver(0, [link._finish(live, FinishReason.LENGTH)], link.life)
    link.next_seq += 1
    await steps(link, 4)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 2)


async def test_a_restarted_scheduler_gets_every_open_stream_again() -> None:
    link = FakeLink()
    front_end = connected(link)
    readers = [Reader(front_end, front_end.open(asked(f"r{i}", seed=i))) for i in range(3)]
    await steps(link, 3)
    link.restart()
    front_end.scheduler_restarted(link.life)
    front_end.scheduler_restarted(link.life)
    await steps(link, 10)
    for seed, reader in enumerate(readers):
        await reader.done()
        assert reader.token_ids() == expected_tokens(PROMPT, seed, 12)
        assert reader.text() == TINY.decode(reader.token_ids())
    assert len(link.submitted) == 6


def seated(request: Request, fingerprint: str) -> Seated:
    return Seated(front_end="front", stream=request.stream, attempt=request.attempt, fingerprint=fingerprint)


@pytest.mark.parametrize(("second", "inexact"), [("same", False), ("other", True)])
async def test_a_stream_resubmitted_to_other_numbers_is_inexact(second: str, inexact: bool) -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await settled()
    link.send([seated(link.submitted[0], "same")])
    await steps(link, 2)
    link.restart()
    front_end.scheduler_restarted(link.life)
    await settled()
    assert link.submitted[1].fingerprint == "same"
    link.send([seated(link.submitted[1], second)])
    await steps(link, 10)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)
    assert reader.finish().inexact is inexact


async def test_numbers_that_change_before_the_first_token_do_not_matter() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await settled()
    link.send([seated(link.submitted[0], "one")])
    link.send([seated(link.submitted[0], "two")])
    await steps(link, 10)
    await reader.done()
    assert not reader.finish().inexact


async def test_a_client_s_own_resumption_names_the_numbers_it_had() -> None:
    link = FakeLink()
    front_end = connected(link)
    resumed = asked(resume_token_ids=expected_tokens(PROMPT, 7, 3), resume_fingerprint="elsewhere")
    reader = Reader(front_end, front_end.open(resumed))
    await settled()
    assert link.submitted[0].fingerprint == "elsewhere"
    link.send([seated(link.submitted[0], "here")])
    await steps(link, 10)
    await reader.done()
    assert reader.finish().inexact


async def test_deliveries_of_an_ended_life_are_dropped() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    old = link.submitted[0]
    link.restart()
    front_end.scheduler_restarted(link.life)
    front_end.deliver(2, [emit(old, 4, [50, 51])], 1)
    await steps(link, 10)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)


async def test_a_stream_waits_for_a_scheduler_that_is_away() -> None:
    link = FakeLink()
    front_end = connected(link)
    link.available = False
    reader = Reader(front_end, front_end.open(asked()))
    await settled()
    assert reader.error is None
    link.restart()
    front_end.scheduler_restarted(link.life)
    await steps(link, 10)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)


async def test_a_scheduler_given_up_ends_streams_as_unavailable() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    front_end.scheduler_lost("no scheduler")
    await reader.done()
    assert reader.error is not None
    assert reader.error.code == "UNAVAILABLE"
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 4)
    with pytest.raises(StreamError, match="no scheduler"):
        front_end.open(asked("later"))
    link.restart()
    front_end.scheduler_restarted(link.life)
    later = Reader(front_end, front_end.open(asked("later")))
    await steps(link, 8)
    await later.done()
    assert later.token_ids() == expected_tokens(PROMPT, 7, 12)


async def test_leaving_cancels_in_the_scheduler_and_only_after_the_submission() -> None:
    link = FakeLink()
    front_end = connected(link)
    link.reachable.clear()
    reader = Reader(front_end, front_end.open(asked()))
    await settled()
    reader.leave()
    await settled()
    assert front_end.num_open_requests == 0
    assert link.cancelled == []
    link.reachable.set()
    await settled()
    assert len(link.submitted) == 1
    assert link.cancelled == [("r", 0)]
    assert link.live == {}


async def test_an_id_can_be_used_again_right_after_its_stream_was_left() -> None:
    link = FakeLink()
    front_end = connected(link)
    first = Reader(front_end, front_end.open(asked()))
    await steps(link, 1)
    first.leave()
    await asyncio.sleep(0)
    second = Reader(front_end, front_end.open(asked(seed=8)))
    await steps(link, 8)
    await second.done()
    assert second.error is None
    assert second.token_ids() == expected_tokens(PROMPT, 8, 12)


async def test_an_open_id_is_refused_to_a_second_first_attempt() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    with pytest.raises(StreamError, match="alive") as caught:
        front_end.open(asked())
    assert caught.value.code == "ALREADY_EXISTS"
    await steps(link, 8)
    await reader.done()
    assert reader.error is None


async def test_a_higher_client_attempt_takes_over_and_resumes() -> None:
    link = FakeLink()
    front_end = connected(link)
    old = Reader(front_end, front_end.open(asked()))
    await steps(link, 3)
    delivered = old.token_ids()
    new = Reader(front_end, front_end.open(asked(attempt=1, resume_token_ids=delivered)))
    await steps(link, 8)
    await old.done()
    await new.done()
    assert old.error is not None
    assert old.error.code == "ABORTED"
    assert link.submitted[1].attempt == MAX_RESUBMISSIONS
    assert delivered + new.token_ids() == expected_tokens(PROMPT, 7, 12)
    assert new.outputs[0].offset == len(delivered)
    assert link.cancelled == []


async def test_cancel_ends_the_stream_with_abort_and_is_idempotent() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    await steps(link, 2)
    assert await front_end.cancel("r")
    await reader.done()
    assert reader.finish().reason is FinishReason.ABORT
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 4)
    assert link.live == {}
    assert not await front_end.cancel("r")


async def test_a_full_queue_is_resource_exhausted_with_a_hint() -> None:
    link = FakeLink(max_live=1)
    front_end = connected(link)
    first = Reader(front_end, front_end.open(asked("a")))
    await settled()
    second = Reader(front_end, front_end.open(asked("b")))
    await second.done()
    assert second.error is not None
    assert (second.error.code, second.error.retry_after_ms) == ("RESOURCE_EXHAUSTED", 1500)
    assert link.cancelled == []
    first.leave()


async def test_a_deadline_reaches_the_scheduler() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked(timeout_s=0.005, max_tokens=1000)))
    running = asyncio.create_task(link.run())
    await reader.done()
    running.cancel()
    assert reader.error is not None
    assert reader.error.code == "DEADLINE_EXCEEDED"
    assert link.live == {}


async def test_n_choices_have_seeds_and_ids_of_their_own() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked(n=3)))
    await steps(link, 8)
    await reader.done()
    assert [request.request_id for request in link.submitted] == ["r#0", "r#1", "r#2"]
    for index in range(3):
        assert reader.token_ids(index) == expected_tokens(PROMPT, choice_seed(7, index, 3), 12)
        assert reader.finish(index).reason is FinishReason.LENGTH
    assert len({tuple(reader.token_ids(index)) for index in range(3)}) == 3


async def test_one_choice_rejected_cancels_the_others() -> None:
    link = FakeLink(max_live=2)
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked(n=3)))
    await reader.done()
    await settled()
    assert reader.error is not None
    assert sorted(name for name, _ in link.cancelled) == ["r#0", "r#1"]
    assert link.live == {}


async def test_a_missing_seed_is_drawn_once() -> None:
    link = FakeLink()
    front_end = connected(link)
    call = front_end.open(asked(seed=None))
    reader = Reader(front_end, call)
    await steps(link, 2)
    link.restart()
    front_end.scheduler_restarted(link.life)
    await steps(link, 8)
    await reader.done()
    assert {request.sampling.seed for request in link.submitted} == {call.seed}
    assert reader.token_ids() == expected_tokens(PROMPT, call.seed, 12)


async def test_logprobs_stay_with_their_tokens_across_repeats() -> None:
    link = FakeLink()
    front_end = connected(link)
    sampling = SamplingParams(num_logprobs=2)
    reader = Reader(front_end, front_end.open(asked(sampling=sampling)))
    await steps(link, 2)
    overlap = emit(link.submitted[0], 2, expected_tokens(PROMPT, 7, 6)[2:])
    front_end.deliver(2, [overlap], link.life)
    link.next_seq += 1
    await steps(link, 8)
    await reader.done()
    assert reader.token_ids() == expected_tokens(PROMPT, 7, 12)
    for output in reader.outputs:
        if output.token_ids:
            assert output.logprobs is not None
            assert output.logprobs.logprobs.tolist() == pytest.approx([-t / 1000 for t in output.token_ids])
            assert output.logprobs.top_token_ids.shape == (len(output.token_ids), 2)


def scripted(text: str) -> FakeLink:
    return FakeLink(script=TINY.encode(text).tolist())


async def test_trap_13_a_stop_string_ends_text_ids_and_logprobs_inside_an_accepted_run() -> None:
    for cut in range(1, 6):
        link = scripted("hello, world. the lazy dog jumps over")
        front_end = connected(link)
        sampling = SamplingParams(num_logprobs=0)
        reader = Reader(front_end, front_end.open(asked(max_tokens=20, stop=(". t",), sampling=sampling)))
        await settled()
        link.live["r"].runs = iter([cut, *[5] * 10])
        await steps(link, 8)
        await reader.done()
        finish = reader.finish()
        assert (finish.reason, finish.stop_string) == (FinishReason.STOP, ". t")
        assert reader.text() == "hello, world"
        token_ids = reader.token_ids()
        assert ". t" in TINY.decode(token_ids)
        assert ". t" not in TINY.decode(token_ids[:-1])
        logprobs = [value for o in reader.outputs if o.logprobs is not None for value in o.logprobs.logprobs.tolist()]
        assert logprobs == pytest.approx([-token_id / 1000 for token_id in token_ids])
        assert finish.num_output_tokens == len(token_ids)
        assert (finish.num_draft_tokens, finish.num_accepted_tokens, finish.num_cached_tokens) == (9, 5, 16)
        assert link.live == {}


async def test_a_stop_string_in_resumed_tokens_finishes_at_once() -> None:
    link = FakeLink()
    front_end = connected(link)
    resume = TINY.encode("one STOP two").tolist()
    reader = Reader(front_end, front_end.open(asked(max_tokens=50, stop=("STOP",), resume_token_ids=resume)))
    await reader.done()
    assert reader.finish().reason is FinishReason.STOP
    assert link.submitted == []


async def test_a_stream_resumed_elsewhere_continues_text_where_it_stopped() -> None:
    text = "the END of 🙂 中文 the ENDINGS"
    link = scripted(text)
    token_ids = TINY.encode(text).tolist()
    options: dict[str, Any] = {"max_tokens": len(token_ids), "stop": ("ENDINGx",)}
    for cut in range(len(token_ids)):
        link = scripted(text)
        front_end = connected(link)
        first = Reader(front_end, front_end.open(asked(**options)))
        await settled()
        link.live["r"].runs = iter([1] * 100)
        await steps(link, cut)
        first.leave()
        await settled()
        second = Reader(front_end, front_end.open(asked(attempt=1, resume_token_ids=token_ids[:cut], **options)))
        await steps(link, 3 * len(token_ids))
        await second.done()
        assert first.text() + "".join(output.text for output in second.outputs) == text
        if second.outputs:
            assert second.outputs[0].text_offset == len(first.text())


STOP_CASES = [
    ("a stop id inside a run", SamplingParams(stop_token_ids=(42,)), 10, [10, 42], FinishReason.STOP, 42),
    ("an eos", SamplingParams(eos_token_ids=(42,)), 10, [10, 42], FinishReason.STOP, None),
    ("max_tokens inside a run", SamplingParams(), 2, [10, 42], FinishReason.LENGTH, None),
    ("ignored eos", SamplingParams(), 5, [10, 42, 12, 42, 13], FinishReason.LENGTH, None),
    ("min_tokens", SamplingParams(stop_token_ids=(42,), min_tokens=3), 10, [10, 42, 12, 42], FinishReason.STOP, 42),
]


@pytest.mark.parametrize("case", STOP_CASES, ids=lambda case: case[0])
async def test_trap_15_stops_as_the_client_sees_them(case: Any) -> None:
    _, sampling, max_tokens, token_ids, reason, stop_token_id = case
    link = FakeLink(script=[10, 42, 12, 42, 13, 14, 15, 16, 17, 18])
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked(sampling=sampling, max_tokens=max_tokens)))
    await settled()
    link.live["r"].runs = iter([10])
    await steps(link, 1)
    await reader.done()
    assert reader.token_ids() == token_ids
    assert (reader.finish().reason, reader.finish().stop_token_id) == (reason, stop_token_id)


async def test_trap_14_each_stream_gets_its_own_logprobs_when_runs_differ() -> None:
    link = FakeLink()
    front_end = connected(link)
    sampling = SamplingParams(num_logprobs=1)
    readers = [Reader(front_end, front_end.open(asked(f"r{i}", seed=i, sampling=sampling))) for i in range(3)]
    await settled()
    rows = [emit(request, 0, expected_tokens(PROMPT, i, 1 + 2 * i)) for i, request in enumerate(link.submitted)]
    front_end.deliver(0, [joined(rows)], link.life)
    await settled()
    for seed, reader in enumerate(readers):
        [output] = reader.outputs
        assert output.token_ids == tuple(expected_tokens(PROMPT, seed, 1 + 2 * seed))
        assert output.logprobs is not None
        assert output.logprobs.logprobs.tolist() == pytest.approx([-t / 1000 for t in output.token_ids])
        reader.leave()


async def test_stopping_waits_for_streams_to_drain() -> None:
    link = FakeLink()
    front_end = connected(link)
    reader = Reader(front_end, front_end.open(asked()))
    draining = asyncio.create_task(front_end.drained())
    await steps(link, 2)
    assert not draining.done()
    await steps(link, 8)
    await reader.done()
    await draining


@pytest.mark.parametrize("seed", range(60))
async def test_no_disorder_on_the_way_shows_in_any_stream(seed: int) -> None:
    """Lost, held back, reversed and repeated deliveries, restarts and lost streams that clients resume."""
    rng = random.Random(seed)
    link = FakeLink()
    front_end = connected(link, gap_timeout_s=rng.choice((0.0, 0.002)))
    taken: dict[int, list[int]] = {number: [] for number in range(5)}
    readers: dict[int, Reader] = {}
    attempts = dict.fromkeys(taken, 0)

    def open_again(number: int) -> None:
        request = asked(f"r{number}", seed=number, max_tokens=40, attempt=attempts[number])
        readers[number] = Reader(front_end, front_end.open(replace(request, resume_token_ids=as_array(taken[number]))))
        attempts[number] += 1

    for number in taken:
        open_again(number)
    for _ in range(400):
        await settled()
        disturb(rng, link, front_end)
        link.step()
        await settled()
        for number, reader in list(readers.items()):
            for output in reader.outputs:
                assert output.offset == len(taken[number])
                taken[number].extend(output.token_ids)
            reader.outputs.clear()
            if reader.error is not None:
                assert reader.error.code == "UNAVAILABLE"
                open_again(number)
        if not front_end.num_open_requests:
            break
        await asyncio.sleep(0.0005)
    for number, token_ids in taken.items():
        assert token_ids == expected_tokens(PROMPT, number, 40)


def disturb(rng: random.Random, link: FakeLink, front_end: FrontEnd) -> None:
    """One thing that a cluster does to messages, or none."""
    match rng.randrange(40):
        case 0:
            link.restart()
            front_end.scheduler_restarted(link.life)
        case 1 | 2 | 3:
            link.lose.add(link.next_seq)
        case 4 | 5 | 6:
            link.held = link.held or []
        case 7 | 8 | 9 | 10 | 11:
            link.release_reversed()
        case 12:
            front_end.fail_open("a test")
        case 13 | 14:
            link.deliver_again(rng.randrange(max(link.next_seq, 1)))


def as_array(token_ids: list[int]) -> Any:
    return np.asarray(token_ids, np.int32)


def test_in_order_skips_a_gap_when_told() -> None:
    order: InOrder[str] = InOrder()
    assert list(order.accept(1, "b")) == []
    assert order.waits
    assert list(order.accept(3, "d")) == []
    assert list(order.skip_gap()) == ["b"]
    assert list(order.accept(0, "a")) == []
    assert list(order.accept(2, "c")) == ["c", "d"]
    assert not order.waits


def joined(rows: list[Any]) -> Any:
    """One command of several rows."""
    logprobs = tuple(replace(row.logprobs[0], row_index=index) for index, row in enumerate(rows))
    columns = ("streams", "attempts", "offsets", "num_tokens", "token_ids")
    return replace(rows[0], logprobs=logprobs, **{c: np.concatenate([getattr(r, c) for r in rows]) for c in columns})
