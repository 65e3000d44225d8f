"""`slipstream stress` for a minute: a deployment whose every process is killed while messages go astray.

Whether it would notice anything is tested by hand-made streams that are wrong.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config import ServeConfig
from cluster.errors import ConfigError
from cluster.sizing import size
from cluster.stress_kill import check_kinds, seat_in
from cluster.stress_load import Asked, References, Stream, difference, make_requests
from cluster.stress_report import Totals
from scheduler.request import FinishReason
from tests.tiny_model import save_tiny_model

SECONDS = 60
KINDS = ("scheduler", "frontend", "worker")  # the slowest to come back is the last
FAULTS = ("--delay", "--repeat", "--reorder", "--drop", "--preempt", "--reset")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_every_process_is_killed_and_every_stream_goes_on_token_for_token(directory: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(directory), "--seconds", str(SECONDS), "--kill", ",".join(KINDS), *FAULTS]
    command = [sys.executable, "-m", "cluster.cli", "stress", *arguments, "--transport", "grpc", "--json"]
    done = subprocess.run(
        [*command, "--concurrency", "3", "--kill-every-s", "6"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one line, and nothing else
    assert report["wrong"] == report["lost"] == report["repeated"] == report["leaked_blocks"] == 0
    assert report["requests"] == report["identical"] > 10
    assert min(report["kills"][kind] for kind in KINDS) >= 1
    assert report["stale_tokens_dropped"] > 0
    assert report["plans_resent"] > 0
    assert report["compared_with_transformers"] > 0


@pytest.fixture(scope="module")
def references(directory: Path) -> tuple[References, list[Asked]]:
    sizes = size(ServeConfig(model=str(directory), dtype="float32", threads=1, num_gpu_blocks_override=64), directory)
    requests = make_requests(8, sizes, seed=5)
    return References(sizes, requests), requests


def stream_of(asked: Asked, token_ids: Sequence[int], reason: FinishReason | None = FinishReason.LENGTH) -> Stream:
    stream = Stream("r", asked, "127.0.0.1:1")
    stream.took(0, token_ids)
    stream.reason = reason
    return stream


def test_a_wrong_missing_or_repeated_token_is_noticed(references: tuple[References, list[Asked]]) -> None:
    undisturbed, requests = references
    asked = next(one for one in requests if one.is_plain)
    right = undisturbed.token_ids(asked)
    assert len(right) == asked.max_tokens
    assert undisturbed.problem_with(stream_of(asked, right)) is None
    assert undisturbed.problem_with_transformers(stream_of(asked, right)) is None
    for wrong in ([*right[:3], right[3] ^ 1, *right[4:]], right[:-1], [*right[:5], *right[4:]]):
        assert undisturbed.problem_with(stream_of(asked, wrong)) is not None
    assert undisturbed.problem_with_transformers(stream_of(asked, [*right[:3], right[3] ^ 1, *right[4:]])) is not None
    assert undisturbed.problem_with(stream_of(asked, right, FinishReason.STOP)) is not None
    assert undisturbed.problem_with(stream_of(asked, right[:7], None)) is None  # its client left


def test_requests_are_of_all_kinds_and_the_same_for_a_seed(directory: Path) -> None:
    sizes = size(ServeConfig(model=str(directory), threads=1), directory)
    requests = make_requests(16, sizes, seed=1)
    assert requests == make_requests(16, sizes, seed=1) != make_requests(16, sizes, seed=2)
    assert {asked.temperature for asked in requests} == {0.0, 0.8}
    assert any(asked.is_plain for asked in requests)
    assert any(asked.few for asked in requests)
    assert any(asked.stop_token_ids for asked in requests)
    assert len({asked.prompt[:16] for asked in requests}) < len(requests)


def test_a_story_tells_which_worker_holds_a_request() -> None:
    story = "[1.0s] r#0 submitted, attempt 0, 3+0 tokens\n[1.0s] r#0 seated: worker a session 7 row 0 epoch 1, T=3"
    assert seat_in(story) == "a"
    assert seat_in(story + "\n[1.1s] r#0 preempted: reset") is None
    assert seat_in(story + "\n[1.1s] r#0 worker a session 7: it was silent") is None
    again = "\n[1.1s] r#0 preempted: reset\n[1.2s] r#0 seated: worker b session 8 row 1 epoch 2, T=9"
    assert seat_in(story + again) == "b"
    assert seat_in("r: never heard of it") is None


def test_counters_go_on_over_the_lives_of_the_scheduler() -> None:
    totals = Totals()
    zero = {"tokens_salvaged": 0, "num_resends": 0, "num_stale_results": 0, "num_preemptions": {}}
    for num_steps, dropped in ((5, 1), (9, 3), (2, 4), (3, 6)):
        totals.take({"num_steps": num_steps, "stale_tokens_dropped": {"reset": dropped}, **zero})
    assert totals.sums()["stale_tokens_dropped"] == 3 + 6


def test_what_cannot_be_killed_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kill must be any of worker,scheduler,frontend, got 'head'"):
        check_kinds(["worker", "head"])


def test_a_difference_names_its_place() -> None:
    assert difference([1, 2, 3], [1, 2, 4, 5]) == "from output 2 on: [3], not [4, 5]"
