"""Plans and results as bytes, for the gRPC transport between a scheduler and its workers.

Columns travel as little-endian arrays. Both ends are of one version; knows nothing about streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from protos import worker_pb2 as pb
from scheduler.request import SamplingParams
from scheduler.step import Arrival, RowFailure, RowLogprobs, StepPlan, StepResult

INT32, INT64, FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
PLAN_COLUMNS = ("rows", "num_scheduled", "num_drafts", "reserved", "num_propose", "block_offsets", "block_ids")
RESULT_COLUMNS = ("rows", "num_tokens", "num_verified", "token_ids")


class NumberedPlan(NamedTuple):
    """A plan and its message's number in its stream."""

    number: int
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one numbered plan: the results it released, or why there are none."""

    number: int
    results: Sequence[StepResult] = ()
    stale: str | None = None  # it is of another session
    failed: str | None = None  # a step of its session failed


def encode_plan(message: NumberedPlan) -> bytes:
    """A pb.Plan."""
    plan = message.plan
    encoded: bytes = pb.Plan(
        number=message.number,
        session=plan.session,
        step_seq=plan.step_seq,
        acknowledged=plan.acknowledged,
        weights=plan.weights,
        released_epochs=_bytes(plan.released_epochs, INT64),
        epochs=_bytes(plan.epochs, INT64),
        arrivals=[_encode_arrival(arrival) for arrival in plan.arrivals],
        **{name: _bytes(getattr(plan, name), INT32) for name in PLAN_COLUMNS},
    ).SerializeToString()
    return encoded


def decode_plan(encoded: bytes) -> NumberedPlan:
    """From a pb.Plan."""
    message: Any = pb.Plan.FromString(encoded)
    plan = StepPlan(
        session=message.session,
        step_seq=message.step_seq,
        acknowledged=message.acknowledged,
        weights=message.weights if message.HasField("weights") else None,
        released_epochs=_array(message.released_epochs, INT64),
        epochs=_array(message.epochs, INT64),
        arrivals=tuple(_decode_arrival(arrival) for arrival in message.arrivals),
        **{name: _array(getattr(message, name), INT32) for name in PLAN_COLUMNS},
    )
    return NumberedPlan(message.number, plan)


def encode_answer(answer: Answer) -> bytes:
    """A pb.Answer."""
    message: Any = pb.Answer(number=answer.number)
    if answer.stale is not None:
        message.stale = answer.stale
    elif answer.failed is not None:
        message.failed = answer.failed
    else:
        message.results.results.extend(_encode_result(result) for result in answer.results)
    encoded: bytes = message.SerializeToString()
    return encoded


def decode_answer(encoded: bytes) -> Answer:
    """From a pb.Answer."""
    message: Any = pb.Answer.FromString(encoded)
    match message.WhichOneof("outcome"):
        case "stale":
            return Answer(number=message.number, stale=message.stale)
        case "failed":
            return Answer(number=message.number, failed=message.failed)
        case _:
            results = tuple(_decode_result(result) for result in message.results.results)
            return Answer(number=message.number, results=results)


def encode_health(session: int | None) -> bytes:
    """A pb.HealthResponse."""
    encoded: bytes = pb.HealthResponse(session=session).SerializeToString()
    return encoded


def decode_health(encoded: bytes) -> int | None:
    """From a pb.HealthResponse."""
    message: Any = pb.HealthResponse.FromString(encoded)
    return message.session if message.HasField("session") else None


def _encode_arrival(arrival: Arrival) -> Any:
    return pb.Arrival(
        row=arrival.row,
        epoch=arrival.epoch,
        request_id=arrival.request_id,
        prompt_token_ids=_bytes(arrival.prompt_token_ids, INT32),
        output_token_ids=_bytes(arrival.output_token_ids, INT32),
        num_computed_tokens=arrival.num_computed_tokens,
        end=arrival.end,
        namespace=arrival.namespace,
        sampling=_encode_sampling(arrival.sampling),
    )


def _decode_arrival(message: Any) -> Arrival:
    return Arrival(
        row=message.row,
        epoch=message.epoch,
        request_id=message.request_id,
        prompt_token_ids=_array(message.prompt_token_ids, INT32),
        output_token_ids=_array(message.output_token_ids, INT32),
        num_computed_tokens=message.num_computed_tokens,
        end=message.end,
        namespace=message.namespace,
        sampling=_decode_sampling(message.sampling),
    )


def _encode_sampling(sampling: SamplingParams) -> Any:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        seed=sampling.seed,
        eos_token_ids=sampling.eos_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.num_logprobs,
    )


def _decode_sampling(message: Any) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.bias_token_ids, message.biases, strict=True)),
        seed=message.seed,
        eos_token_ids=tuple(message.eos_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def _encode_result(result: StepResult) -> Any:
    return pb.Result(
        worker_id=result.worker_id,
        session=result.session,
        step_seq=result.step_seq,
        epochs=_bytes(result.epochs, INT64),
        failures=[pb.RowFailure(epoch=failure.epoch, message=failure.message) for failure in result.failures],
        logprobs=[_encode_logprobs(row) for row in result.logprobs],
        verify_ns=result.verify_ns,
        draft_ns=result.draft_ns,
        idle_ns=result.idle_ns,
        **{name: _bytes(getattr(result, name), INT32) for name in RESULT_COLUMNS},
    )


def _decode_result(message: Any) -> StepResult:
    return StepResult(
        worker_id=message.worker_id,
        session=message.session,
        step_seq=message.step_seq,
        epochs=_array(message.epochs, INT64),
        failures=tuple(RowFailure(epoch=failure.epoch, message=failure.message) for failure in message.failures),
        logprobs=tuple(_decode_logprobs(row) for row in message.logprobs),
        verify_ns=message.verify_ns,
        draft_ns=message.draft_ns,
        idle_ns=message.idle_ns,
        **{name: _array(getattr(message, name), INT32) for name in RESULT_COLUMNS},
    )


def _encode_logprobs(row: RowLogprobs) -> Any:
    return pb.RowLogprobs(
        row_index=row.row_index,
        logprobs=_bytes(row.logprobs, FLOAT32),
        top_token_ids=_bytes(row.top_token_ids, INT32),
        top_logprobs=_bytes(row.top_logprobs, FLOAT32),
        num_top=row.top_token_ids.shape[1],
    )


def _decode_logprobs(message: Any) -> RowLogprobs:
    logprobs = _array(message.logprobs, FLOAT32)
    shape = (len(logprobs), message.num_top)
    return RowLogprobs(
        row_index=message.row_index,
        logprobs=logprobs,
        top_token_ids=_array(message.top_token_ids, INT32).reshape(shape),
        top_logprobs=_array(message.top_logprobs, FLOAT32).reshape(shape),
    )


def _bytes(column: NDArray[Any], dtype: DTypeLike) -> bytes:
    return column.astype(dtype, copy=False).tobytes()


def _array(content: bytes, dtype: DTypeLike) -> NDArray[Any]:
    """Read-only: plans and results are never written to."""
    return np.frombuffer(content, dtype)
