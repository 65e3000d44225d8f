"""A request's life in the front end's log, each line with its id; what it asks is left out unless that is wanted."""

import logging
from typing import Any

from cluster.call import Call, StreamError
from cluster.choice import Choice
from cluster.text import Tokenizer
from scheduler.request import FinishReason

log = logging.getLogger(__name__)


class RequestLog:
    """A cluster.frontend.RequestObserver."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, prompts: bool = False) -> None:
        """With `prompts` they are logged, as text where there is a tokenizer."""
        self._tokenizer, self._prompts = tokenizer, prompts

    def rejected(self, request_id: str, error: StreamError | ValueError) -> None:
        """It was not taken."""
        if isinstance(error, StreamError):
            log.info("rejected", extra={"request_id": request_id, "code": error.code, "reason": error.message})
        else:  # the message may quote the request
            reason = str(error) if self._prompts else "the request is not valid"
            log.info("rejected", extra={"request_id": request_id, "code": "INVALID_ARGUMENT", "reason": reason})

    def opened(self, call: Call) -> None:
        """It was taken."""
        request = call.request
        fields: dict[str, Any] = {
            **_named(call),
            "num_prompt_tokens": len(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "n": request.n,
            "num_resumed_tokens": len(request.resume_token_ids),
        }
        if self._prompts:
            token_ids = request.prompt_token_ids.tolist()
            fields["prompt"] = self._tokenizer.decode(token_ids) if self._tokenizer is not None else token_ids
        log.info("admitted", extra=fields)

    def first_token(self, call: Call, choice: Choice, now_s: float) -> None:
        """Of one choice."""
        if log.isEnabledFor(logging.DEBUG):
            after_s = round(now_s - call.opened_s, 6)
            log.debug("first token", extra={**_named(call), "choice": choice.index, "after_s": after_s})

    def resubmitted(self, call: Call, choice: Choice) -> None:
        """Tokens or the scheduler were lost: it goes on as another attempt."""
        log.info("resubmitted", extra={**_named(call), "choice": choice.index, "num_tokens": choice.num_tokens})

    def closed(self, call: Call, now_s: float) -> None:
        """It is over, for its reader too."""
        took_s = round(now_s - call.opened_s, 6)
        if call.error is not None:
            error = {"code": call.error.code, "reason": call.error.message}
            log.info("failed", extra={**_named(call), **error, "took_s": took_s})
            return
        for choice in call.choices:
            finish = choice.finish
            fields: dict[str, Any] = {**_named(call), "choice": choice.index, "took_s": took_s}
            fields["num_output_tokens"] = choice.num_tokens
            if finish is None or finish.reason is FinishReason.ABORT:
                log.info("cancelled", extra={**fields, "by": "leaving" if finish is None else "call"})
                continue
            fields |= {
                "reason": finish.reason.value,
                "num_prompt_tokens": finish.num_prompt_tokens,
                "num_cached_tokens": finish.num_cached_tokens,
                "num_draft_tokens": finish.num_draft_tokens,
                "num_accepted_tokens": finish.num_accepted_tokens,
                "num_preemptions": finish.num_preemptions,
                "inexact": finish.inexact,
            }
            log.info("finished", extra=fields)


def _named(call: Call) -> dict[str, Any]:
    return {"request_id": call.request.request_id, "attempt": call.request.attempt}
