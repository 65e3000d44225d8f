"""What a client asks for and how a request can end: the vocabulary shared by every room.

Knows nothing about text (token ids only), workers or transports.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class FinishReason(Enum):
    """Why a request ended. The values are what clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class RejectCode(Enum):
    """Why a submission was not taken. The values are gRPC status names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that decides a token besides the model and the tokens before it.

    The token at absolute position t is
    `argmax(processed_logits / temperature + gumbel(seed, t, token_id))`; temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0  # in (0, 1]; 1 keeps every token
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # > 0, over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # unsigned 64 bit
    eos_token_ids: tuple[int, ...] = ()  # end the request, reason "stop"; empty under ignore_eos
    stop_token_ids: tuple[int, ...] = ()  # end the request and are named as its stop reason
    min_tokens: int = 0  # eos and stop ids are masked before this many outputs
    num_logprobs: int | None = None  # top alternatives per token; 0 gives the sampled token's only


def empty_tokens() -> NDArray[np.int32]:
    """No token ids: [0] int32."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One attempt of a request, as a front end submits it.

    Prompt and already delivered outputs are separate: their border matters to penalties and limits.
    """

    request_id: str
    attempt: int = 0  # a higher attempt of a live id replaces it
    front_end: str  # where its tokens go
    stream: int  # the front end's own number for this attempt, echoed with every token
    prompt_token_ids: NDArray[np.int32]  # [num_prompt_tokens], never empty
    resume_token_ids: NDArray[np.int32] = field(default_factory=empty_tokens)  # outputs delivered before
    fingerprint: str | None = None  # of the numbers that these were computed with; None: unknown
    max_tokens: int  # outputs in all, resumed ones included; >= 1
    sampling: SamplingParams = SamplingParams()
    max_drafts: int | None = None  # caps K for this request; None leaves it to the server
    priority: int = 0  # lower runs first under the priority policy
    deadline_ns: int | None = None  # on the scheduler's clock (Tick.now_ns)
    cache_salt: str = ""  # requests of different salts never share a prefix block
    tenant: str = ""  # requests of different tenants neither

    @property
    def most_tokens(self) -> int:
        """Of its prompt and its output together."""
        return len(self.prompt_token_ids) + self.max_tokens
