from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(_message.Message):
    __slots__ = ("number", "session", "step_seq", "acknowledged", "weights", "released_epochs", "arrivals", "rows", "epochs", "num_scheduled", "num_drafts", "reserved", "num_propose", "block_offsets", "block_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    session: int
    step_seq: int
    acknowledged: int
    weights: str
    released_epochs: bytes
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    rows: bytes
    epochs: bytes
    num_scheduled: bytes
    num_drafts: bytes
    reserved: bytes
    num_propose: bytes
    block_offsets: bytes
    block_ids: bytes
    def __init__(self, number: _Optional[int] = ..., session: _Optional[int] = ..., step_seq: _Optional[int] = ..., acknowledged: _Optional[int] = ..., weights: _Optional[str] = ..., released_epochs: _Optional[bytes] = ..., arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., rows: _Optional[bytes] = ..., epochs: _Optional[bytes] = ..., num_scheduled: _Optional[bytes] = ..., num_drafts: _Optional[bytes] = ..., reserved: _Optional[bytes] = ..., num_propose: _Optional[bytes] = ..., block_offsets: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("row", "epoch", "request_id", "prompt_token_ids", "output_token_ids", "num_computed_tokens", "end", "namespace", "sampling")
    ROW_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    row: int
    epoch: int
    request_id: str
    prompt_token_ids: bytes
    output_token_ids: bytes
    num_computed_tokens: int
    end: int
    namespace: int
    sampling: Sampling
    def __init__(self, row: _Optional[int] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., output_token_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., end: _Optional[int] = ..., namespace: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_ids", "biases", "seed", "eos_token_ids", "stop_token_ids", "min_tokens", "num_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "results", "stale", "failed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    number: int
    results: Results
    stale: str
    failed: str
    def __init__(self, number: _Optional[int] = ..., results: _Optional[_Union[Results, _Mapping]] = ..., stale: _Optional[str] = ..., failed: _Optional[str] = ...) -> None: ...

class Results(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("worker_id", "session", "step_seq", "rows", "epochs", "num_tokens", "num_verified", "token_ids", "failures", "logprobs", "verify_ns", "draft_ns", "idle_ns")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    session: int
    step_seq: int
    rows: bytes
    epochs: bytes
    num_tokens: bytes
    num_verified: bytes
    token_ids: bytes
    failures: _containers.RepeatedCompositeFieldContainer[RowFailure]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    verify_ns: int
    draft_ns: int
    idle_ns: int
    def __init__(self, worker_id: _Optional[str] = ..., session: _Optional[int] = ..., step_seq: _Optional[int] = ..., rows: _Optional[bytes] = ..., epochs: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_verified: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., failures: _Optional[_Iterable[_Union[RowFailure, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., verify_ns: _Optional[int] = ..., draft_ns: _Optional[int] = ..., idle_ns: _Optional[int] = ...) -> None: ...

class RowFailure(_message.Message):
    __slots__ = ("epoch", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    message: str
    def __init__(self, epoch: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row_index", "logprobs", "top_token_ids", "top_logprobs", "num_top")
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    row_index: int
    logprobs: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    num_top: int
    def __init__(self, row_index: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., num_top: _Optional[int] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...
