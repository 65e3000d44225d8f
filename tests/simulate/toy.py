"""A deterministic toy model: the next token is a hash of every token before it, the weights and the seed.

A misplaced, lost or repeated token changes everything after it, so no mistake can hide for long.
"""

from collections.abc import Iterable

from scheduler.request import FinishReason, Request, SamplingParams

VOCABULARY = 32
NUM_STOPPABLE = 8  # only ids below this one are ever eos or stop ids
EMPTY = 0x1F3D5B79  # the hash of no tokens

_MODULUS = (1 << 61) - 1
_BASE = 0x0B4E0EF37BC32127
_MASK = (1 << 64) - 1


class Violation(AssertionError):
    """The scheduler broke a promise, seen from outside of it."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def extend(prefix: int, token_id: int) -> int:
    """The hash of a token sequence from the hash of all but its last token."""
    return (prefix * _BASE + token_id + 1) % _MODULUS


def chain(token_ids: Iterable[int], prefix: int = EMPTY) -> list[int]:
    """The hash up to and including each token."""
    hashes = []
    for token_id in token_ids:
        prefix = (prefix * _BASE + token_id + 1) % _MODULUS
        hashes.append(prefix)
    return hashes


def scramble(value: int) -> int:
    """64 well mixed bits."""
    value = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return value ^ (value >> 32)


def kv_key(namespace: int, version: int, salt: int) -> int:
    """What must agree, besides the tokens, for one request to read KV that another wrote."""
    return scramble(namespace * 1_000_003 + version * 10_007 + salt * 101 + 7)


def stops(sampling: SamplingParams) -> frozenset[int]:
    """Token ids that end a request."""
    return frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids)


def next_token(prefix: int, version: int, seed: int, ends: frozenset[int], masked: bool) -> int:
    """The one token that follows; `masked`: too early (min_tokens) for any of `ends`."""
    bits = scramble(prefix + version * 0x5851F42D4C957F2D + seed * 0x14057B7EF767814F)
    token_id = bits % VOCABULARY
    if masked and token_id in ends:
        return NUM_STOPPABLE + (bits >> 32) % (VOCABULARY - NUM_STOPPABLE)
    return token_id


def ending(request: Request, token_ids: list[int], max_model_len: int) -> FinishReason | None:
    """Why these outputs end the request, or None while they do not."""
    sampling = request.sampling
    if token_ids and len(token_ids) > sampling.min_tokens:
        last = token_ids[-1]
        if last in sampling.eos_token_ids or last in sampling.stop_token_ids:
            return FinishReason.STOP
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    return FinishReason.LENGTH if len(token_ids) >= limit else None
