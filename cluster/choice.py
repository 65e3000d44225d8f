"""One choice of a request at the front end: the gate for its tokens, its text, and its end.

A request with n > 1 is n choices, each a scheduler request of its own. Knows nothing about who
delivers tokens or who reads them.
"""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from cluster.text import OutputText
from scheduler.events import FinishRequest
from scheduler.request import FinishReason, Request
from scheduler.step import Float32Array, Int32Array, RowLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """Log-probabilities of some tokens and their best alternatives, column by column."""

    logprobs: Float32Array  # [num_tokens]
    top_token_ids: Int32Array  # [num_tokens, num_top]
    top_logprobs: Float32Array  # [num_tokens, num_top]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a choice ended."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    inexact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """What became ready of one choice since the message before. `finish` comes with the last one."""

    index: int
    offset: int  # of token_ids[0] in the choice's output
    token_ids: tuple[int, ...]
    text_offset: int  # of text in the choice's text, in characters
    text: str
    logprobs: Logprobs | None = None
    finish: Finish | None = None


class Taken(Enum):
    """What became of a run of tokens at the gate."""

    NOTHING_NEW = "nothing new"
    NEW = "new"
    GAP = "gap"  # tokens before these are missing
    STOPPED = "stopped"  # a stop string ended the choice; the scheduler has yet to hear of it


class Choice:
    """Takes tokens in any number of repeats and hands each of them on once."""

    def __init__(self, request: Request, *, index: int, text: OutputText | None) -> None:
        self.request = request  # the attempt subscribed to
        self.index = index
        self.finish: Finish | None = None
        self.num_resubmissions = 0
        self.seated_s: float | None = None  # when it was first planned, on the loop's clock
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None  # None before the first
        self.fingerprint = request.fingerprint  # of the numbers its tokens were computed with; None: unknown
        self.inexact = False  # it went on with others
        self._text = text
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._num_read = len(request.resume_token_ids)
        self._num_characters_read = 0
        self._finish_read = False
        self._replay(request.resume_token_ids.tolist())

    @property
    def num_tokens(self) -> int:
        """Outputs so far, resumed ones included."""
        return len(self._token_ids)

    @property
    def stopped(self) -> bool:
        """A stop string was found: no token will follow."""
        return self._text is not None and self._text.stop_string is not None

    @property
    def closed(self) -> bool:
        """The reader has had the last message."""
        return self._finish_read

    def take(self, offset: int, token_ids: list[int], logprobs: RowLogprobs | None) -> Taken:
        """Takes a run of tokens at an absolute output offset, skipping those it has."""
        assert self.finish is None
        assert not self.stopped
        skip = self.num_tokens - offset
        if skip < 0:
            return Taken.GAP
        if skip >= len(token_ids):
            return Taken.NOTHING_NEW
        num_before = self.num_tokens
        stopped = self._push(token_ids[skip:])
        if logprobs is not None:
            end = skip + self.num_tokens - num_before
            self._logprobs.append(
                Logprobs(
                    logprobs=logprobs.logprobs[skip:end],
                    top_token_ids=logprobs.top_token_ids[skip:end],
                    top_logprobs=logprobs.top_logprobs[skip:end],
                )
            )
        return Taken.STOPPED if stopped else Taken.NEW

    def seated(self, fingerprint: str, now_s: float) -> None:
        """What comes now is computed with these numbers."""
        self.seated_s = self.seated_s or now_s
        if self.num_tokens == 0 or self.fingerprint is None:
            self.fingerprint = fingerprint
        self.inexact = self.inexact or fingerprint != self.fingerprint

    def end(self, command: FinishRequest) -> None:
        """The scheduler ended this attempt, and every token of it was taken or lies behind a stop string."""
        assert self.stopped or self.num_tokens >= command.num_output_tokens
        self._end(
            Finish(
                reason=command.reason,
                stop_token_id=command.stop_token_id,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_output_tokens=self.num_tokens,
                num_cached_tokens=command.num_cached_tokens,
                num_draft_tokens=command.num_draft_tokens,
                num_accepted_tokens=command.num_accepted_tokens,
                num_preemptions=command.num_preemptions,
                inexact=command.inexact or self.inexact,
            )
        )

    def end_here(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the choice with what it has, without the scheduler's counts."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        self._end(
            Finish(
                reason=reason,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=self.num_tokens,
                inexact=self.inexact,
            )
        )

    def next_attempt(self, stream: int) -> Request:
        """The same request once more, going on after the tokens taken so far; older attempts are deaf."""
        self.num_resubmissions += 1
        self.request = replace(
            self.request,
            attempt=self.request.attempt + 1,
            stream=stream,
            resume_token_ids=np.asarray(self._token_ids, np.int32),
            fingerprint=self.fingerprint,
        )
        return self.request

    def read(self) -> Output | None:
        """Everything that became ready since the last read, as one message; None if nothing did."""
        text = self._text.release() if self._text is not None else ""
        token_ids = tuple(self._token_ids[self._num_read :])
        finish = None if self._finish_read else self.finish
        if not (text or token_ids or finish):
            return None
        output = Output(
            index=self.index,
            offset=self._num_read,
            token_ids=token_ids,
            text_offset=self._num_characters_read,
            text=text,
            logprobs=_joined(self._logprobs),
            finish=finish,
        )
        self._num_read = len(self._token_ids)
        self._num_characters_read += len(text)
        self._logprobs.clear()
        self._finish_read = finish is not None
        return output

    def _replay(self, token_ids: list[int]) -> None:
        """Brings text and stop strings to where they were; what that releases was read before."""
        self._push(token_ids)
        if self._text is not None:
            self._num_characters_read = len(self._text.release())
        self._num_read = self.num_tokens

    def _push(self, token_ids: list[int]) -> bool:
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self._text is not None and self._text.push(token_id):
                return True
        return False

    def _end(self, finish: Finish) -> None:
        if self._text is not None:
            self._text.end()
            if self._text.stop_string is not None:
                stop_string = self._text.stop_string
                finish = replace(finish, reason=FinishReason.STOP, stop_string=stop_string, stop_token_id=None)
        self.finish = finish


def _joined(parts: list[Logprobs]) -> Logprobs | None:
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Logprobs(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_token_ids=np.concatenate([part.top_token_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
