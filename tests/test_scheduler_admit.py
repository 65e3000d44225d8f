"""Who is admitted, when and where: blocks, order, priority, placement."""

from typing import Any

import numpy as np
import pytest

from scheduler.events import CacheReset, DrainRequested, PreemptRequested, StepFinished, SwapRequested
from tests.builders import Stage, prompt_of, scripted, submitted


def small(**config: Any) -> Stage:
    """Blocks of 4, one step in flight, no drafts: slots are easy to count."""
    return Stage(**{"block_size": 4, "max_drafts": 0, "max_steps_in_flight": 1} | config)


def seated(stage: Stage) -> list[str]:
    """Requests in the order they were seated."""
    return [arrival.request_id for arrival in stage.arrivals]


# ---- blocks ----


@pytest.mark.parametrize(("num_tokens", "admitted"), [(11, True), (12, False)])
def test_admission_needs_blocks_for_all_tokens_and_one_frame(num_tokens: int, admitted: bool) -> None:
    """Not for the first chunk only: three blocks are free, and one more token than they hold is too many."""
    stage = small(max_num_batched_tokens=20)
    stage.up(num_blocks=8)
    stage.handle(submitted("r0", 17, max_tokens=3))
    assert stage.pool().num_free == 3
    stage.handle(submitted("r1", num_tokens, max_tokens=8))
    stage.answer()
    assert stage.is_running("r1") == admitted
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 3), "r1": scripted("r1", 0, 8)}
    stage.assert_settled()


def test_admission_counts_the_drafts_of_one_frame() -> None:
    """T + 1 + K, but never past the request's end."""
    stage = small(max_drafts=4, enable_prefix_caching=False)
    stage.up(num_blocks=5)
    stage.handle(submitted("r0", 7, max_tokens=1))
    assert stage.pool().num_free == 3
    stage.handle(submitted("r1", 8, max_tokens=12))  # 8 + 1 + 4 are four blocks
    stage.handle(submitted("r2", 8, max_tokens=2))  # ends at 10: three would do, but r1 is first
    stage.answer()
    assert seated(stage) == ["r0", "r1"]
    stage.run()
    assert stage.outputs["r2"] == scripted("r2", 0, 2)


def test_admission_asks_for_nothing_past_the_end() -> None:
    """8 + 1 + 4 would be four blocks, but the request ends at 10."""
    stage = small(max_drafts=4)
    stage.up(num_blocks=3)
    stage.handle(submitted("r0", 8, max_tokens=2))
    assert stage.is_running("r0")
    stage.run()
    stage.assert_settled()


def test_idle_hit_blocks_count_as_used() -> None:
    """Two free blocks, both cached for this very prompt, do not make room for a third."""
    stage = small()
    stage.up(num_blocks=6)
    stage.handle(submitted("r0", 8, max_tokens=1))
    stage.run()
    assert stage.pool().num_cached == 2
    stage.handle(submitted("r1", 13, max_tokens=3))
    assert (stage.pool().num_free, stage.pool().num_cached) == (2, 2)
    stage.handle(submitted("r2", [*prompt_of("r0", 8).tolist(), 5], max_tokens=2))  # hits both, needs a third
    stage.answer()
    assert not stage.is_running("r2")
    stage.run()
    assert stage.arrivals_of("r2")[0].num_computed_tokens == 8
    assert stage.outputs["r2"] == scripted("r2", 0, 2)


def test_hit_blocks_in_use_cost_nothing() -> None:
    """A prefix shared with a running request needs no free block."""
    stage = small()
    stage.up(num_blocks=6)
    stage.handle(submitted("r0", 16, max_tokens=4))
    stage.answer()
    assert stage.pool().num_free == 1
    stage.handle(submitted("r1", [*prompt_of("r0", 16).tolist(), 5], max_tokens=2))
    stage.answer()
    assert stage.arrivals_of("r1")[0].num_computed_tokens == 16
    assert stage.block_table("r1")[:4] == stage.block_table("r0")[:4]
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 4), "r1": scripted("r1", 0, 2)}
    stage.assert_settled()


def test_plan_that_preempted_admits_nobody() -> None:
    """What it took from one request it does not give to another."""
    stage = small(enable_prefix_caching=False, max_steps_in_flight=2)
    for index in range(8):
        stage.handle(submitted(f"r{index}", 5 + index, max_tokens=20))
    stage.up(num_blocks=20)
    preempted = num_plans = 0
    while stage.unanswered["a"]:
        num_plans = len(stage.plans)
        stage.answer()
        count = stage.scheduler.stats().num_preemptions.get("blocks", 0)
        if count > preempted:
            assert stage.plans[num_plans].arrivals == ()
        preempted = count
    assert preempted > 2
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, 20) for index in range(8)}
    stage.assert_settled()


def test_plan_that_preempted_gives_nothing_of_it_to_an_older_waiting_request() -> None:
    """r1 would fit into what r2 just lost: it must wait for the next plan, in which r2 no longer runs."""
    stage = small(enable_prefix_caching=False)
    for index, num_tokens in enumerate([5, 4, 8]):
        stage.handle(submitted(f"r{index}", num_tokens, max_tokens=28 - num_tokens))
    stage.up(num_blocks=8)
    for _ in range(4):
        stage.answer()
    stage.handle(PreemptRequested(request_id="r1"))
    while stage.is_running("r2"):
        stage.answer()
    assert stage.scheduler.stats().num_preemptions == {"requested": 1, "blocks": 1}
    assert list(stage.in_flight()[-1]) == ["r0"]
    assert stage.unanswered["a"][-1].arrivals == ()
    stage.answer()
    assert stage.is_running("r1")
    stage.run()
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, length) for index, length in enumerate([23, 24, 20])}


def test_nobody_behind_a_draining_request_is_admitted() -> None:
    """Otherwise those behind take the blocks it will need when its tokens have come."""
    stage = Stage(block_size=8, max_steps_in_flight=4, max_drafts=0, enable_prefix_caching=False)
    stage.handle(submitted("r0", 8, max_tokens=40), submitted("r1", 12, max_tokens=36))
    stage.up(num_blocks=7)
    while not stage.scheduler.requests["r1"].num_deliver_frames:
        stage.answer()
    assert stage.pool().num_free >= 1
    stage.handle(submitted("r2", 4, max_tokens=2))
    while stage.scheduler.requests["r1"].num_deliver_frames:
        assert "r2" not in seated(stage)
        stage.answer()
    stage.run()
    assert seated(stage).index("r2") > 2
    assert stage.outputs["r2"] == scripted("r2", 0, 2)
    stage.assert_settled()


def test_request_no_live_worker_can_hold_blocks_nobody() -> None:
    """It waits for a larger worker; those behind it run."""
    stage = small()
    stage.up("a", num_blocks=4)
    stage.handle(submitted("r0", 16, max_tokens=4), submitted("r1", 8, max_tokens=4))
    assert seated(stage) == ["r1"]
    stage.run()
    assert sorted(stage.finished) == ["r1"]
    stage.up("b", session=2, num_blocks=5)
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 4)
    assert stage.rejected == []


# ---- order ----


def test_head_of_the_queue_is_not_overtaken_where_it_could_run() -> None:
    """A small request behind a large one waits for it, though it would fit: nobody starves."""
    stage = small()
    stage.up(num_blocks=6)
    stage.handle(submitted("r0", 12, max_tokens=4))
    stage.handle(submitted("r1", 16, max_tokens=4), submitted("r2", 4, max_tokens=1))
    stage.answer()
    assert seated(stage) == ["r0"]
    stage.run()
    assert seated(stage) == ["r0", "r1", "r2"]


def test_request_may_overtake_on_a_worker_the_head_cannot_run_on() -> None:
    """The head waits for the large worker; the small one is open to those behind."""
    stage = small()
    stage.up("a", num_blocks=6)
    stage.handle(submitted("r0", 12, max_tokens=4))
    stage.up("b", session=2, num_blocks=2)
    stage.handle(submitted("r1", 16, max_tokens=4), submitted("r2", 4, max_tokens=1))
    assert seated(stage) == ["r0", "r2"]
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 4)


def test_free_rows_limit_who_runs() -> None:
    """max_num_seqs requests at a time, and each row goes to the next when it is left."""
    stage = small()
    stage.up(max_num_seqs=2)
    for index in range(4):
        stage.handle(submitted(f"r{index}", 4, max_tokens=2))
    assert stage.scheduler.stats().num_running <= 2
    stage.run()
    assert seated(stage) == ["r0", "r1", "r2", "r3"]
    assert {arrival.row for arrival in stage.arrivals} == {0, 1}


def test_step_admits_until_its_budget_is_spent() -> None:
    """The last one in gets a chunk."""
    stage = small(max_num_batched_tokens=20)
    stage.handle(*(submitted(f"r{index}", 8, max_tokens=2) for index in range(4)))
    stage.up()
    frames = stage.in_flight()[0]
    assert {name: (frame.num_scheduled, frame.reserved) for name, frame in frames.items()} == {
        "r0": (8, 1), "r1": (8, 1), "r2": (4, 0),
    }  # fmt: skip
    stage.answer()
    assert {name: frame.num_scheduled for name, frame in stage.in_flight()[0].items()} == {
        "r0": 1, "r1": 1, "r2": 4, "r3": 8,
    }  # fmt: skip


def test_preempted_request_returns_to_its_old_place_in_the_queue() -> None:
    """Before all who came after it."""
    stage = small()
    stage.up(max_num_seqs=2)
    stage.handle(*(submitted(f"r{index}", 4, max_tokens=6) for index in range(4)))
    stage.answer()
    assert sorted(stage.scheduler.requests) == ["r0", "r1", "r2", "r3"]
    stage.handle(CacheReset(reset_running=True))
    assert [state.request.request_id for state in stage.scheduler.waiting] == ["r0", "r1", "r2", "r3"]
    stage.run()
    assert seated(stage) == ["r0", "r1", "r0", "r1", "r2", "r3"]


# ---- priority ----


def test_priority_orders_the_queue_and_arrival_breaks_ties() -> None:
    """Lower runs first."""
    stage = small(scheduling_policy="priority")
    for index, priority in enumerate([5, 1, 5, -3]):
        stage.handle(submitted(f"r{index}", 4, max_tokens=2, priority=priority))
    stage.up(max_num_seqs=1)
    stage.run()
    assert seated(stage) == ["r3", "r1", "r0", "r2"]


def test_first_come_first_served_ignores_priority_and_preempts_nobody_for_the_queue() -> None:
    """Waiting requests preempt only under the priority policy."""
    stage = small()
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 4, max_tokens=8, priority=9), submitted("r1", 4, max_tokens=2, priority=5))
    stage.handle(submitted("r2", 4, max_tokens=2, priority=0))
    stage.run()
    assert seated(stage) == ["r0", "r1", "r2"]
    assert stage.scheduler.stats().num_preemptions == {}


def test_waiting_request_preempts_the_lowest_running_one() -> None:
    """Not the last to come, and no more than it needs; equals are left alone."""
    stage = small(scheduling_policy="priority")
    stage.up(max_num_seqs=3)
    for index, priority in enumerate([7, 9, 8]):
        stage.handle(submitted(f"r{index}", 4, max_tokens=20, priority=priority))
        stage.answer()
    stage.handle(submitted("r3", 4, max_tokens=4, priority=7))
    stage.answer()
    assert [stage.is_running(f"r{index}") for index in range(4)] == [True, False, True, True]
    assert stage.scheduler.stats().num_preemptions == {"priority": 1}
    stage.handle(submitted("r4", 4, max_tokens=4, priority=9))  # not lower than anybody running
    stage.answer()
    assert stage.scheduler.stats().num_preemptions == {"priority": 1}
    stage.run()
    lengths = [20, 20, 20, 4, 4]
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, length) for index, length in enumerate(lengths)}
    assert stage.finished["r1"].num_preemptions == 1
    stage.assert_settled()


def test_priority_preemption_delivers_what_is_in_flight() -> None:
    """The victim loses no token and is not planned again before they came."""
    stage = small(scheduling_policy="priority", max_steps_in_flight=3)
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 4, max_tokens=20, priority=1))
    stage.answer()
    stage.handle(submitted("r1", 4, max_tokens=2, priority=0))
    stage.answer()
    assert stage.scheduler.requests["r0"].num_deliver_frames == 2
    stage.run()
    assert stage.scheduler.stats().tokens_salvaged == 2
    assert stage.outputs == {"r0": scripted("r0", 0, 20), "r1": scripted("r1", 0, 2)}


def test_nobody_is_preempted_for_a_request_that_would_not_fit_even_then() -> None:
    """No step preempts for nothing: the blocks of all lower ones must suffice for T + 1 + K. vLLM issue 49674."""
    stage = small(scheduling_policy="priority", max_drafts=4, enable_prefix_caching=False)
    stage.up(num_blocks=8)
    stage.handle(submitted("r0", 16, max_tokens=16, max_drafts=0, priority=0))
    stage.answer()
    stage.handle(submitted("r1", 8, max_tokens=16, max_drafts=0, priority=5))
    stage.answer()
    assert (len(stage.block_table("r1")), stage.pool().num_free) == (2, 1)
    stage.handle(submitted("r2", 9, max_tokens=8, priority=0))  # 9 + 1 fit into r1's blocks, 9 + 1 + 4 do not
    stage.answer()
    assert stage.is_running("r1")
    assert stage.scheduler.stats().num_preemptions == {}
    stage.run()
    assert stage.outputs["r2"] == scripted("r2", 0, 8)


def test_blocks_a_victim_shares_are_not_counted_as_room() -> None:
    """They stay in use by the others, so preempting for them frees nothing. vLLM issue 49674."""
    stage = small(scheduling_policy="priority")
    prefix = prompt_of("r9", 12).tolist()
    stage.up(num_blocks=6)
    stage.handle(submitted("r0", [*prefix, 1], max_tokens=8, priority=0))
    stage.answer()
    stage.handle(submitted("r1", [*prefix, 2], max_tokens=8, priority=5))
    stage.answer()
    assert stage.is_running("r1")
    assert stage.block_table("r0")[:3] == stage.block_table("r1")[:3]
    stage.handle(submitted("r2", 11, max_tokens=1, priority=0))  # three blocks; r1 alone could give two at most
    stage.answer()
    assert stage.is_running("r1")
    assert stage.scheduler.stats().num_preemptions == {}
    stage.run()
    assert stage.outputs["r2"] == scripted("r2", 0, 1)


def test_higher_priority_finds_the_worker_that_can_make_room() -> None:
    """The lowest running request may be where too little can be freed; the head does not wait for it."""
    stage = small(scheduling_policy="priority")
    stage.up("a", num_blocks=6)
    stage.handle(submitted("r0", 12, max_tokens=8, priority=0), submitted("r1", 4, max_tokens=4, priority=9))
    stage.answer("a")
    stage.up("b", session=2, num_blocks=6)
    stage.handle(submitted("r2", 17, max_tokens=7, priority=5))
    stage.answer("b")
    assert seated(stage) == ["r0", "r1", "r2"]
    stage.handle(submitted("r3", 14, max_tokens=2, priority=1))  # r1 on "a" has two blocks, r2 on "b" five
    stage.answer("a")
    stage.answer("b")
    assert stage.is_running("r3")
    assert not stage.is_running("r2")
    assert stage.is_running("r1")
    stage.run()
    assert stage.outputs["r2"] == scripted("r2", 0, 7)


def test_lowest_running_request_is_sought_on_every_worker_that_plans() -> None:
    """Either could make room: the one with the lowest goes."""
    stage = small(scheduling_policy="priority")
    stage.up("a", max_num_seqs=1)
    stage.handle(submitted("r0", 4, max_tokens=20, priority=5))
    stage.up("b", session=2, max_num_seqs=1)
    stage.handle(submitted("r1", 4, max_tokens=20, priority=9))
    assert stage.is_running("r1")
    stage.handle(submitted("r2", 4, max_tokens=4, priority=1))
    first, second = stage.execute("a"), stage.execute("b")
    stage.handle(StepFinished(result=second), StepFinished(result=first))
    assert [stage.is_running(name) for name in ("r0", "r1", "r2")] == [True, False, True]
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 20)


def test_draining_head_preempts_nobody_before_its_tokens_have_come() -> None:
    """It could not be planned yet, so what it took would lie idle."""
    stage = small(scheduling_policy="priority", max_steps_in_flight=2)
    stage.up("a", max_num_seqs=1)
    stage.handle(submitted("r0", 4, max_tokens=20, priority=5))
    stage.up("b", session=2, max_num_seqs=1)
    stage.handle(submitted("r1", 4, max_tokens=20, priority=9))
    stage.handle(submitted("r2", 4, max_tokens=4, priority=1))
    stage.answer("a")  # r0 must go to r2: only its worker plans now
    assert stage.scheduler.requests["r0"].num_deliver_frames == 1
    stage.answer("b")
    assert stage.is_running("r1")
    stage.answer("a")
    stage.answer("b")
    assert [stage.is_running(name) for name in ("r0", "r1", "r2")] == [True, False, True]
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 20)
    assert stage.outputs["r1"] == scripted("r1", 0, 20)
    stage.assert_settled()


# ---- placement ----


def test_placement_prefers_the_cached_prefix_then_the_lighter_worker_then_the_first() -> None:
    """A long shared prefix outweighs one running request; without one load decides."""
    stage = Stage(max_drafts=0, max_steps_in_flight=4)
    stage.up("a")
    stage.up("b", session=2)
    prefix = prompt_of("r9", 64).tolist()
    stage.handle(submitted("r0", prefix, max_tokens=30))
    stage.answer("a")
    stage.handle(submitted("r1", [*prefix, 1], max_tokens=30))
    stage.answer("a")
    stage.handle(submitted("r2", 8, max_tokens=30))
    where = {name: state.worker.worker_id for name, state in stage.scheduler.requests.items() if state.worker}
    assert where == {"r0": "a", "r1": "a", "r2": "b"}
    assert stage.arrivals_of("r1")[0].num_computed_tokens == 64
    stage.run()
    stage.assert_settled()


def test_salts_share_no_blocks() -> None:
    """A cache shared by tenants tells neither of the other."""
    stage = Stage(max_drafts=0)
    stage.up()
    prompt = prompt_of("r0", 40).tolist()
    for index, salt in enumerate(["", "east", "west", "east"]):
        stage.handle(submitted(f"r{index}", prompt, max_tokens=2, cache_salt=salt))
        stage.run()
    assert [arrival.num_computed_tokens for arrival in stage.arrivals] == [0, 0, 0, 32]


def test_draining_worker_gets_nobody() -> None:
    """Requests go elsewhere, or wait."""
    stage = small()
    stage.up("a")
    stage.up("b", session=2)
    stage.handle(DrainRequested(worker_id="a", deadline_ns=10**12))
    stage.handle(submitted("r0", 8, max_tokens=2), submitted("r1", 8, max_tokens=2))
    stage.run()
    assert sorted(stage.finished) == ["r0", "r1"]
    assert stage.workers["a"].next_step_seq == 0


def test_request_resumes_on_equal_numbers_if_it_can() -> None:
    """However loaded that worker is; a stream with tokens of both kinds is marked and counted."""
    stage = small()
    stage.up("a", fingerprint="cpu")
    stage.up("b", session=2, fingerprint="gpu")
    stage.up("c", session=3, fingerprint="cpu", max_num_seqs=4)
    stage.handle(submitted("r0", 8, max_tokens=10))
    stage.answer("a")
    stage.handle(*(submitted(f"r{index}", 8, max_tokens=30) for index in (1, 2, 3, 4)))
    for worker_id in ("a", "b", "c"):
        stage.answer(worker_id)
    stage.handle(DrainRequested(worker_id="a", deadline_ns=10**12), CacheReset(reset_running=True))
    stage.run()
    assert not stage.finished["r0"].inexact
    assert stage.scheduler.stats().num_inexact == sum(finish.inexact for finish in stage.finished.values())

    lone = small()
    lone.up("a", fingerprint="cpu")
    lone.handle(submitted("r0", 8, max_tokens=10), submitted("r1", 8, max_tokens=10))
    lone.answer("a")
    lone.answer("a")
    lone.up("a", session=2, fingerprint="gpu")
    lone.run()
    assert lone.finished["r0"].inexact
    assert lone.finished["r1"].inexact
    assert lone.scheduler.stats().num_inexact == 2
    assert lone.outputs["r0"] == scripted("r0", 0, 10)


def test_request_moved_before_its_first_token_is_exact() -> None:
    """Its whole stream has the numbers of the second worker."""
    stage = small()
    stage.up("a", fingerprint="cpu")
    stage.handle(submitted("r0", 8, max_tokens=10))
    stage.up("a", session=2, fingerprint="gpu")
    stage.run()
    assert not stage.finished["r0"].inexact
    assert stage.outputs["r0"] == scripted("r0", 0, 10)


def test_stream_that_crosses_a_swap_of_weights_is_inexact_and_one_that_began_after_it_is_not() -> None:
    """Its first tokens are another model's; also where the same worker, or one that was swapped too, goes on."""
    stage = small()
    stage.up("a", fingerprint="cpu")
    stage.handle(submitted("r0", 8, max_tokens=10))
    stage.answer("a")
    stage.answer("a")
    stage.handle(SwapRequested(weights="1 /other"))
    stage.handle(submitted("r1", 8, max_tokens=10))
    stage.run()
    assert stage.finished["r0"].inexact
    assert not stage.finished["r1"].inexact
    assert stage.scheduler.workers["a"].fingerprint == "cpu swapped=(1 /other)"


def test_arrival_says_what_the_worker_must_know() -> None:
    """Prompt and outputs apart, the end, the hit, the namespace and the parameters."""
    stage = Stage(max_drafts=0, max_model_len=64)
    stage.up()
    stage.handle(CacheReset())
    stage.handle(submitted("r0", 20, max_tokens=9, resume=[1, 2, 3]))
    [arrival] = stage.arrivals
    assert np.array_equal(arrival.prompt_token_ids, prompt_of("r0", 20))
    assert arrival.output_token_ids.tolist() == [1, 2, 3]
    assert (arrival.end, arrival.num_computed_tokens, arrival.namespace) == (29, 0, 1)
    assert stage.frames_of("r0")[0].num_scheduled == 23
    stage.run()
    assert stage.outputs["r0"] == [1, 2, 3, *scripted("r0", 3, 9)]
