"""The speculation benchmark: what it concludes, what it draws, and one small run of it all."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scheduler.step import StepPlan
from tests import tiny_tokenizer
from tests.bench.speculation import benchmark, check_same_streams, chosen, parse
from tests.bench.speculation_figures import (
    Costs,
    Decode,
    Load,
    Measured,
    Setting,
    best_fixed,
    interval,
    ratio,
    summary,
    theoretical_speedup,
    theory,
)
from tests.bench.speculation_page import page
from tests.builders import result_of
from tests.heads import Sketch, save_head
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


NONE, AUTO, TWO, FOUR = Setting("none"), Setting("auto"), Setting("ngram", 2), Setting("ngram", 4)


def run_of(tokens_per_s: float, **fields: object) -> Measured:
    told: dict[str, object] = {"acceptance_length": 1.0, "decode": Decode(), "costs": Costs()} | fields
    return Measured(streams=[[0] * 100], num_tokens=100, elapsed_s=100 / tokens_per_s, **told)  # type: ignore[arg-type]


def runs_of(*speeds: float) -> list[Measured]:
    return [run_of(speed) for speed in speeds]


# ---- what it concludes ----


def test_the_interval_is_of_order_statistics_and_as_confident_as_promised() -> None:
    assert interval([float(i) for i in range(10)]) == (1.0, 8.0)  # 97.9 %; one further in: 89.1 %
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([5.0]) == (5.0, 5.0)
    low, high = interval([float(i) for i in range(40)])
    outside = 2 * sum(math.comb(40, i) for i in range(int(low) + 1)) / 2**40
    assert outside <= 0.05 < outside + 2 * math.comb(40, int(low) + 1) / 2**40
    assert high == 39 - low


def test_ratios_are_of_the_same_round_so_that_a_slow_minute_disturbs_neither() -> None:
    assert ratio(runs_of(10, 1, 30), runs_of(8, 1, 30)) == 1.0
    assert ratio(runs_of(10, 2, 30), runs_of(8, 1, 30)) == 1.25


def test_the_best_fixed_setting_may_be_none_and_is_never_auto() -> None:
    assert best_fixed({NONE: runs_of(5), TWO: runs_of(4), AUTO: runs_of(9)}) == NONE
    assert best_fixed({NONE: runs_of(5, 5, 5), TWO: runs_of(9, 1, 6)}) == TWO
    assert best_fixed({AUTO: runs_of(1)}) is None


def test_auto_is_judged_by_its_worst_load() -> None:
    result = summary(
        {
            Load("chat", 1): {NONE: runs_of(10), TWO: runs_of(12), FOUR: runs_of(20), AUTO: runs_of(18)},
            Load("copy", 8): {NONE: runs_of(10), TWO: runs_of(8), FOUR: runs_of(5), AUTO: runs_of(9.9)},
        }
    )
    assert (result["auto_vs_none_min"], result["auto_vs_best_min"]) == (0.99, 0.9)
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [(row["workload"], row["setting"]) for row in rows][:5] == [
        ("chat", "none"), ("chat", "ngram:2"), ("chat", "ngram:4"), ("chat", "auto"), ("copy", "none"),
    ]  # fmt: skip


def test_the_theory_is_leviathans_with_the_measured_cost_of_verifying() -> None:
    assert theoretical_speedup(0.0, 3, draft_cost=0.0) == 1.0
    assert theoretical_speedup(0.8, 3, draft_cost=0.0) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert theoretical_speedup(1.0, 3, draft_cost=0.25, verify_cost=1.25) == pytest.approx(4 / 2)
    assert theoretical_speedup(0.5, 1, draft_cost=0.0, drafted=0.5) == pytest.approx(1.25)


def plan_of(num_scheduled: Sequence[int], reserved: Sequence[int]) -> StepPlan:
    count = len(reserved)
    counts = np.array(reserved, np.int32)
    return StepPlan(
        session=1, step_seq=0, acknowledged=-1, weights=None, released_epochs=np.empty(0, np.int64), arrivals=(),
        rows=np.arange(count, dtype=np.int32), epochs=np.arange(1, 1 + count), num_scheduled=np.array(num_scheduled),
        num_drafts=counts - 1, reserved=counts, num_propose=counts, block_offsets=np.zeros(count + 1, np.int32),
        block_ids=np.empty(0, np.int32),
    )  # fmt: skip


def test_only_steps_in_which_everybody_decodes_count_for_the_theory() -> None:
    decode = Decode()
    verify = plan_of([3, 3], [3, 3])
    decode.add(verify, result_of(verify, [[5, 6, 7], [5]], num_verified=[2, 2]), 2)
    decode.add(verify, result_of(verify, [[5], []], num_verified=[2, 0]), 2)  # one has ended
    chunk = plan_of([9, 3], [1, 3])
    decode.add(chunk, result_of(chunk, [[5], [5]]), 2)  # one reads its prompt
    decode.add(verify, result_of(verify, [[5], [5]]), 3)  # one is waiting
    assert (decode.num_steps, decode.num_frames, decode.num_drafted) == (1, 2, 2)
    assert (decode.num_tried, decode.num_accepted, decode.num_tokens) == (3, 2, 4)


def test_measured_and_theoretical_speedup_agree_where_the_theory_holds() -> None:
    plain = Decode(num_steps=100, num_frames=100, num_tokens=100, verify_ns=1000)
    # Of 100 frames with one draft, half are accepted; verifying costs 1.1 steps, drafting 0.1.
    decode = Decode(
        num_steps=100, num_frames=100, num_drafted=100, num_tried=100, num_accepted=50, num_tokens=150,
        verify_ns=1100, draft_ns=100,
    )  # fmt: skip
    told = theory(Setting("eagle3", 1), decode, plain)
    assert told is not None
    assert told["speedup"] == pytest.approx(1.25)
    assert told["theoretical"] == pytest.approx(1.25)
    assert theory(AUTO, decode, plain) is None
    assert theory(Setting("eagle3", 1), decode, Decode()) is None


# ---- what it draws ----


def test_the_page_stands_alone_and_shows_every_setting() -> None:
    decode = Decode(num_steps=1, num_frames=1, num_drafted=1, num_tried=1, num_accepted=1, num_tokens=2, verify_ns=9)
    costs = Costs(reserved=7, placeholders=[1, 2], garbage=[0, 3], stale={"finished": 2})
    with_all = run_of(20, decode=decode, costs=costs)
    rounds = {NONE: [run_of(10, decode=decode)], TWO: [with_all], AUTO: [with_all]}
    result = summary({Load("chat", count): rounds for count in (1, 8)})
    text = page("python -m <it>", result)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    assert text.count("<svg") == text.count("</svg>") == 2
    for name in ("none", "auto", "ngram, best K", "chat x 8, ngram:2", "python -m &lt;it&gt;"):
        assert name in text


# ---- a run ----


def test_settings_are_chosen_by_drafter_or_by_name() -> None:
    every = [NONE, TWO, FOUR, AUTO]
    assert chosen(every, None) == every
    assert chosen(every, "auto,ngram:4") == [FOUR, AUTO]
    assert chosen(every, "ngram") == [TWO, FOUR]
    with pytest.raises(ValueError, match="medusa is none of auto, ngram, ngram:2, ngram:4, none"):
        chosen(every, "medusa")


def test_a_setting_with_another_stream_is_named() -> None:
    other = run_of(10)
    other.streams[0][3] = 1
    check_same_streams({NONE: runs_of(10), TWO: runs_of(20)})
    with pytest.raises(AssertionError, match="ngram:2 and none gave different streams"):
        check_same_streams({NONE: runs_of(10), TWO: [other]})


def test_every_kind_of_drafter_runs_on_weights_that_were_loaded_once(tmp_path: Path) -> None:
    target, draft, head = (tmp_path / name for name in ("target", "draft", "head"))
    config = save_tiny_model(target)
    save_tiny_model(draft, seed=1)
    save_head(Sketch(target=config), head)
    tiny_tokenizer.save(target)
    names = "none,ngram:2,eagle3:2,ngram+eagle3:2,draft_model:1,ngram+draft_model:3,auto"
    words = ["--model", str(target), "--head", str(head), "--draft-model", str(draft), "--settings", names]
    words += ["--threads", "1", "--rounds", "2", "--concurrency", "3", "--workload", "chat", "--max-tokens", "12"]
    result = benchmark(parse(words))
    rows = {row["setting"]: row for row in result["rows"]}
    assert list(rows) == names.split(",")
    assert all(row["low"] <= row["tokens_per_s"] <= row["high"] for row in rows.values())
    assert rows["none"]["costs"]["rolled_back"] == rows["none"]["costs"]["garbage_peak"] == 0
    assert rows["ngram+draft_model:3"]["costs"]["rolled_back"] > 0
    assert rows["eagle3:2"]["theory"]["draft_cost"] > 0
    assert result["auto_vs_none_min"] > 0
    assert "ngram+eagle3, best K" in page("command", result)
    json.dumps(result)
