"""Committing a result: tokens appended, rollback by the frame's own numbers, blocks published, logprobs cut."""

import numpy as np
import pytest

from scheduler.blocks import extend_digests, root_digest
from scheduler.events import CacheReset, Command, EmitTokens, StepFinished
from scheduler.request import FinishReason, SamplingParams
from scheduler.step import RowLogprobs
from tests.builders import Counted, Stage, prompt_of, scripted, submitted


def accepts_four(_request_id: str, _num_outputs: int, num_drafts: int) -> int:
    return min(num_drafts, 4)


def rejects_all(_request_id: str, _num_outputs: int, _num_drafts: int) -> int:
    return 0


def cached_prefix(stage: Stage, token_ids: list[int], worker_id: str = "a") -> int:
    """How many leading blocks of these tokens could be hit now."""
    digests: list[bytes] = []
    size = stage.config.block_size
    extend_digests(digests, root_digest(""), np.array(token_ids, np.int32), len(token_ids) // size, size)
    return len(stage.pool(worker_id).match(digests))


# ---- rollback ----


def test_rollback_across_a_block_border_is_token_level_only() -> None:
    """Block 16, C = 1024 (block 64, slot 0), 5 drafts, 2 accepted: C = 1021 (block 63, slot 13), the table unchanged.

    Slots 13-15 of block 63 hold garbage until the next step overwrites them.
    """
    stage = Stage(max_drafts=5, max_steps_in_flight=1)
    stage.handle(submitted("r0", 1018, max_tokens=100))
    stage.up(num_blocks=80)
    stage.answer()
    assert stage.counted() == Counted(T=1019, C=1024, PH=6, IF=6)
    table = stage.block_table("r0")
    assert divmod(stage.counted().C, 16) == (64, 0)

    stage.reply({"r0": [1, 2, 3]})
    after = stage.counted()  # the next step is planned already: C - IF is what this one left
    assert after.T == 1022
    assert after.C - after.IF == 1021
    assert divmod(1021, 16) == (63, 13)
    assert stage.block_table("r0")[: len(table)] == table
    assert after.IF == 6  # from slot 13 on: the garbage is overwritten
    assert stage.pool().num_cached == 63


def test_rejected_drafts_cost_slots_and_are_never_hashed() -> None:
    """K = 5 and four accepted: one garbage slot a step, and no block is published before it holds confirmed tokens."""
    stage = Stage(max_drafts=5, max_steps_in_flight=1, num_accepted=accepts_four)
    stage.handle(submitted("r0", 20, max_tokens=202))
    stage.up()
    stage.answer()
    steps = 0
    while "r0" not in stage.finished:
        before = stage.scheduler.stats()
        drafts = stage.in_flight()[0]["r0"].num_drafts
        stage.answer()
        if drafts < 5:
            break
        steps += 1
        after = stage.scheduler.stats()
        assert after.num_generation_tokens - before.num_generation_tokens == 5
        assert after.tokens_rolled_back - before.tokens_rolled_back == 1
        counted = stage.counted()
        confirmed = [*prompt_of("r0", 20).tolist(), *stage.outputs["r0"]]
        assert stage.pool().num_cached == cached_prefix(stage, confirmed) == (counted.T - 1) // 16
    assert steps == 40


def test_result_rolls_back_by_its_own_frame_with_others_in_flight() -> None:
    """C -= K - A, PH -= 1 + K, T += A + 1, whatever the frames behind it reserved."""
    stage = Stage(max_drafts=4, max_steps_in_flight=3)
    stage.handle(submitted("r0", 20, max_tokens=12))
    stage.up()
    before = stage.counted()
    assert [frames["r0"].num_drafts for frames in stage.in_flight()] == [0, 4, 4]
    stage.reply({"r0": [1]})
    frame = stage.in_flight()[-1]["r0"]
    after = stage.counted()
    assert after == Counted(
        T=before.T + 1,
        C=before.C + frame.num_scheduled,
        PH=before.PH - 1 + frame.reserved,
        IF=before.IF - 20 + frame.num_scheduled,
    )
    before = after
    stage.reply({"r0": [2, 3]})
    frame = stage.in_flight()[-1]["r0"]
    assert stage.counted() == Counted(
        T=before.T + 2,
        C=before.C - (4 - 1) + frame.num_scheduled,
        PH=before.PH - 5 + frame.reserved,
        IF=before.IF - 5 + frame.num_scheduled,
    )


def test_missing_drafts_are_rolled_back_and_count_nowhere() -> None:
    """A drafter that had fewer than planned: acceptance is of those it had."""
    stage = Stage(max_drafts=4, max_steps_in_flight=1)
    stage.handle(submitted("r0", 20, max_tokens=60))
    stage.up()
    stage.reply({"r0": [1]})
    stage.reply({"r0": [2, 3]}, num_verified={"r0": 1})
    stage.reply({"r0": [4]}, num_verified={"r0": 0})
    stats = stage.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 1, 1)
    assert stats.tokens_rolled_back == 3 + 4
    counted = stage.counted()
    assert counted.T == 24
    assert counted.C - counted.PH == 23


@pytest.mark.parametrize(
    ("num_drafts", "emitted"), [(3, [1, 5]), (3, [1, 2, 3, 4]), (0, [5]), (3, [9])],
    ids=["one accepted", "all accepted", "no drafts", "none accepted"],
)  # fmt: skip
def test_accepted_drafts_and_one_more_token_are_emitted(num_drafts: int, emitted: list[int]) -> None:
    """Drafts [1, 2, 3], samples [1, 5, ..] give [1, 5]; all right gives all and one more; no drafts give one."""
    stage = Stage(max_drafts=num_drafts, max_steps_in_flight=1)
    stage.handle(submitted("r0", 20, max_tokens=60))
    stage.up()
    stage.reply({"r0": [7]})
    assert stage.in_flight()[0]["r0"].num_drafts == num_drafts
    stage.reply({"r0": emitted})
    assert stage.outputs["r0"] == [7, *emitted]
    num_tokens, *_ = stage.counted()
    assert num_tokens == 21 + len(emitted)


def test_rows_of_one_step_accept_different_counts() -> None:
    """Tokens, offsets and counters stay with their rows."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(*(submitted(f"r{index}", 8 + index, max_tokens=60) for index in range(3)))
    stage.up()
    stage.reply({"r0": [1], "r1": [2], "r2": [3]})
    stage.reply({"r0": [10, 11, 12, 13], "r1": [20], "r2": [30, 31]})
    assert stage.outputs == {"r0": [1, 10, 11, 12, 13], "r1": [2, 20], "r2": [3, 30, 31]}
    assert [stage.counted(f"r{index}").T for index in range(3)] == [8 + 5, 9 + 2, 10 + 3]
    for index in range(3):
        counted = stage.counted(f"r{index}")
        assert counted.C - counted.IF == counted.T - 1


# ---- what is emitted ----


def logprobs_of(row_index: int, num_tokens: int, base: int) -> RowLogprobs:
    """Two alternatives a token, told apart by `base`."""
    token_ids = base + np.arange(2 * num_tokens, dtype=np.int32).reshape(num_tokens, 2)
    return RowLogprobs(
        row_index=row_index,
        logprobs=-np.arange(base, base + num_tokens, dtype=np.float32),
        top_token_ids=token_ids,
        top_logprobs=-token_ids.astype(np.float32),
    )


def emitted(commands: list[Command]) -> list[EmitTokens]:
    return [command for command in commands if isinstance(command, EmitTokens)]


def test_each_row_gets_its_own_logprobs() -> None:
    """Rows that accept different counts, one of them without logprobs. vLLM issue 34497."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(*(submitted(f"r{index}", 8, max_tokens=60) for index in range(3)))
    stage.up()
    stage.reply({"r0": [1], "r1": [2], "r2": [3]})
    logprobs = (logprobs_of(0, 3, 100), logprobs_of(2, 2, 200))
    [emit] = emitted(stage.reply({"r0": [10, 11, 12], "r1": [20], "r2": [30, 31]}, logprobs=logprobs))
    by_stream = {int(emit.streams[row.row_index]): row for row in emit.logprobs}
    assert sorted(by_stream) == [0, 2]
    assert by_stream[0].logprobs.tolist() == [-100, -101, -102]
    assert by_stream[2].logprobs.tolist() == [-200, -201]
    assert by_stream[2].top_token_ids.tolist() == [[200, 201], [202, 203]]


def test_tokens_and_logprobs_end_together_at_a_stop_inside_an_accepted_run() -> None:
    """What the model sampled after the stop is nobody's. vLLM issue 47616."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 8, max_tokens=60, sampling=SamplingParams(stop_token_ids=(42,), num_logprobs=2)))
    stage.handle(submitted("r1", 8, max_tokens=60))
    stage.up()
    stage.reply({"r0": [1], "r1": [2]})
    logprobs = (logprobs_of(0, 4, 100), logprobs_of(1, 2, 200))
    [emit] = emitted(stage.reply({"r0": [10, 42, 12, 13], "r1": [20, 21]}, logprobs=logprobs))
    assert stage.outputs == {"r0": [1, 10, 42], "r1": [2, 20, 21]}
    assert stage.finished["r0"].reason is FinishReason.STOP
    by_stream = {int(emit.streams[row.row_index]): row for row in emit.logprobs}
    assert by_stream[0].logprobs.tolist() == [-100, -101]
    assert by_stream[0].top_token_ids.shape == by_stream[0].top_logprobs.shape == (2, 2)
    assert by_stream[1].logprobs.tolist() == [-200, -201]


def test_logprobs_follow_rows_through_chunks_and_front_ends() -> None:
    """Row indices of a command are its own: rows without tokens and rows of other front ends are not in it."""
    stage = Stage(max_num_batched_tokens=40, max_drafts=0, max_steps_in_flight=1)
    stage.handle(submitted("r0", 4, front_end="west"), submitted("r1", 4, front_end="east"))
    stage.handle(submitted("r2", 4, front_end="west"), submitted("r3", 60, front_end="east"))
    stage.up()
    logprobs = tuple(logprobs_of(index, 1, 100 * index) for index in range(3))
    east, west = sorted(
        emitted(stage.reply({"r0": [1], "r1": [2], "r2": [3]}, logprobs=logprobs)), key=lambda emit: emit.front_end
    )
    assert (east.front_end, east.streams.tolist(), east.token_ids.tolist()) == ("east", [1], [2])
    assert (west.front_end, west.streams.tolist(), west.token_ids.tolist()) == ("west", [0, 2], [1, 3])
    assert [(row.row_index, row.logprobs.tolist()) for row in east.logprobs] == [(0, [-100])]
    assert [(row.row_index, row.logprobs.tolist()) for row in west.logprobs] == [(0, [0]), (1, [-200])]


def test_step_of_chunks_emits_nothing() -> None:
    """No command for no tokens."""
    stage = Stage(max_num_batched_tokens=16, max_drafts=0, max_steps_in_flight=1)
    stage.handle(submitted("r0", 60))
    stage.up()
    assert emitted(stage.answer()) == []


# ---- what is published ----


def test_block_is_published_once_confirmed_and_completed() -> None:
    """Published tokens <= min(T - 1, C - IF): nothing in flight, and not the last token."""
    stage = Stage(max_num_batched_tokens=32, max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 64, max_tokens=20))
    stage.up()
    assert stage.counted().C == 64
    assert stage.pool().num_cached == 0  # both chunks are on their way
    stage.answer()
    assert stage.pool().num_cached == 2
    stage.answer()
    assert (stage.counted().T, stage.pool().num_cached) == (65, 4)
    for _ in range(15):
        stage.answer()
    assert (stage.counted().T, stage.pool().num_cached) == (80, 4)  # the KV of the last token may not be written
    stage.answer()
    assert (stage.counted().T, stage.pool().num_cached) == (81, 5)


def test_last_token_is_not_published_even_where_a_run_went_on() -> None:
    """A stop cuts the run at a block border: T = 16, so 15 tokens may be published."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 13, max_tokens=20, sampling=SamplingParams(stop_token_ids=(42,))))
    stage.up()
    stage.reply({"r0": [7]})
    stage.reply({"r0": [10, 42, 12, 13]})
    assert stage.finished["r0"].num_output_tokens == 3
    assert stage.pool().num_cached == 0


def test_accepted_tokens_become_reusable_and_rejected_ones_never() -> None:
    """Another request with the confirmed text hits every full block of it."""
    stage = Stage(max_drafts=4, max_steps_in_flight=2, num_accepted=accepts_four)
    stage.handle(submitted("r0", 20, max_tokens=80))
    stage.up()
    stage.run()
    text = [*prompt_of("r0", 20).tolist(), *stage.outputs["r0"]]
    stage.handle(submitted("r1", text, max_tokens=1))
    [arrival] = stage.arrivals_of("r1")
    assert arrival.num_computed_tokens == 99 // 16 * 16
    assert stage.frames_of("r1")[0].num_scheduled == 100 - 96


def test_row_that_fails_alone_publishes_nothing_of_its_frame() -> None:
    """What earlier steps completed stays published, what this one would have written does not."""
    stage = Stage(max_num_batched_tokens=48, max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 16, max_tokens=20), submitted("r1", 64, max_tokens=20))
    stage.up()
    stage.answer()  # r0: 16, r1: 32
    assert cached_prefix(stage, prompt_of("r1", 64).tolist()) == 2
    stage.reply({"r0": [1]}, failed={"r1": "broken row"})
    assert cached_prefix(stage, prompt_of("r1", 64).tolist()) == 2
    assert (stage.finished["r1"].reason, stage.finished["r1"].message) == (FinishReason.ERROR, "broken row")
    stage.run()
    assert stage.finished["r0"].reason is FinishReason.LENGTH
    stage.assert_settled()


def test_request_publishes_only_under_the_namespace_its_epoch_began_in() -> None:
    """A reset while it runs: it goes on undisturbed, and nothing it wrote before or after is found."""
    stage = Stage(max_drafts=2, max_steps_in_flight=2)
    stage.handle(submitted("r0", 40, max_tokens=60))
    stage.up()
    stage.answer()
    assert stage.pool().num_cached == 2
    stage.handle(CacheReset(reset_running=False))
    assert stage.scheduler.async_tokens_to_discard("r0") == 0
    stage.run()
    assert stage.pool().num_cached == 0
    assert stage.outputs["r0"] == scripted("r0", 0, 60)
    text = [*prompt_of("r0", 40).tolist(), *stage.outputs["r0"]]
    stage.handle(submitted("r1", text, max_tokens=2))
    assert stage.arrivals_of("r1")[0].num_computed_tokens == 0
    stage.run()
    assert stage.pool().num_cached == 6  # a new epoch publishes again


def test_dropped_frame_publishes_nothing() -> None:
    """Its blocks belong to others by now."""
    stage = Stage(max_num_batched_tokens=64, max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 64, max_tokens=20))
    stage.up()
    old = stage.execute()
    stage.handle(CacheReset(reset_running=True), StepFinished(result=old))
    assert stage.pool().num_cached == 0


def test_prefix_caching_can_be_switched_off() -> None:
    """Nothing is published, nothing is hit."""
    stage = Stage(enable_prefix_caching=False, max_drafts=0)
    stage.up()
    for stream in range(2):
        stage.handle(submitted("r0", 64, max_tokens=2, stream=stream))
        stage.run()
    assert stage.pool().num_cached == 0
    assert [arrival.num_computed_tokens for arrival in stage.arrivals] == [0, 0]
    assert stage.scheduler.stats().prefix_cache_hits == 0
