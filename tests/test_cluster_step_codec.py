"""Plans and results survive their way through bytes, field by field."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from cluster.step_codec import (
    Answer,
    NumberedPlan,
    decode_answer,
    decode_health,
    decode_plan,
    encode_answer,
    encode_health,
    encode_plan,
)
from scheduler.request import SamplingParams
from scheduler.step import Arrival, RowFailure, RowLogprobs, StepPlan, StepResult

SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((7, 60.0), (9, -1.5)),
    seed=(1 << 64) - 1,
    eos_token_ids=(2,),
    stop_token_ids=(5, 3),
    min_tokens=4,
    num_logprobs=0,
)


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


def int64(*values: int) -> Any:
    return np.array(values, np.int64)


def arrival(sampling: SamplingParams) -> Arrival:
    return Arrival(
        row=3,
        epoch=1 << 40,
        request_id="Grüße #1",
        prompt_token_ids=int32(1, 2, 3),
        output_token_ids=int32(),
        num_computed_tokens=2,
        end=99,
        namespace=1,
        sampling=sampling,
    )


PLAN = StepPlan(
    session=1 << 60,
    step_seq=5,
    acknowledged=-1,
    weights="/models/other",
    released_epochs=int64(1, 1 << 40),
    arrivals=(arrival(SAMPLING), arrival(SamplingParams())),
    rows=int32(0, 3),
    epochs=int64(8, 1 << 40),
    num_scheduled=int32(5, 3),
    num_drafts=int32(4, 0),
    reserved=int32(5, 1),
    num_propose=int32(4, 4),
    block_offsets=int32(0, 1, 3),
    block_ids=int32(7, 8, 9),
)
RESULT = StepResult(
    worker_id="worker-0",
    session=1 << 60,
    step_seq=5,
    rows=int32(0, 3),
    epochs=int64(8, 1 << 40),
    num_tokens=int32(3, 0),
    num_verified=int32(4, 0),
    token_ids=int32(11, 12, 13),
    failures=(RowFailure(epoch=1 << 40, message="not finite"),),
    logprobs=(
        RowLogprobs(
            row_index=0,
            logprobs=np.array([-0.5, -1.0, -2.0], np.float32),
            top_token_ids=np.arange(6, dtype=np.int32).reshape(3, 2),
            top_logprobs=np.linspace(-3, 0, 6, dtype=np.float32).reshape(3, 2),
        ),
    ),
    verify_ns=1,
    draft_ns=2,
    idle_ns=3,
)


def same(left: Any, right: Any) -> bool:
    """Equal in every field, arrays by type, shape and content."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if is_dataclass(left):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) and type(left) is type(right)


@pytest.mark.parametrize("plan", [PLAN, StepPlan(session=1, step_seq=0, acknowledged=-1)])
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan) -> None:
    assert same(decode_plan(encode_plan(NumberedPlan(4, plan))), NumberedPlan(4, plan))


@pytest.mark.parametrize(
    "answer",
    [
        Answer(number=1, results=(RESULT, StepResult(worker_id="w", session=1, step_seq=0))),
        Answer(number=2),
        Answer(number=3, stale=""),
        Answer(number=4, failed="step 3 failed"),
    ],
)
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    assert same(decode_answer(encode_answer(answer)), answer)


def test_a_worker_in_no_session_says_so() -> None:
    assert decode_health(encode_health(None)) is None
    assert decode_health(encode_health(1 << 60)) == 1 << 60
