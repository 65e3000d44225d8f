"""Drafter-invariant sampling of one row of logits.

The token at absolute position t is `argmax(processed_logits / temperature + gumbel(seed, t, token_id))`,
so it depends on the logits, the parameters and the tokens before it, never on who drafted it, what
else was in the batch or how often it was tried (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The
noise is Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3"): integer operations and two logarithms per token, no state.

Every row is processed alone, in operations whose shapes depend on that row only: neighbours cannot
change a bit of it. Knows nothing about batches, KV or text.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.request import SamplingParams
from scheduler.step import Float32Array, Int32Array, Int64Array
from worker import cpu_kernels

Float64Array = NDArray[np.float64]
UInt64Array = NDArray[np.uint64]

_LOW, _SHIFT = cpu_kernels.LOW_WORD, cpu_kernels.HALF_WORD
_MULTIPLIERS = (cpu_kernels.PHILOX_0, cpu_kernels.PHILOX_1)
_WEYL = (cpu_kernels.WEYL_0, cpu_kernels.WEYL_1)

# gumbel = -log(-log(u)) for u in [2**-33, 1 - 2**-33]: from -3.14 to 22.88.
_NOISE_SPAN = 26.1
MAX_TRIED = 256  # tokens whose noise is computed at once; of a drafter's, the others are hardly ever the best


def philox4x32(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[UInt64Array, UInt64Array]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Four 32-bit random words per counter, as uint64 below 2**32; all arguments too, and they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(cpu_kernels.PHILOX_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: int, position: int | Int64Array, token_ids: Int64Array) -> Float64Array:
    """Standard Gumbel noise of tokens at positions, which broadcast: float64, always finite.

    Tokens 4g..4g+3 are the four words of counter (g, position, 0, 0) under key `seed`; each word w is
    the uniform number (w + 1/2) / 2**32, exact in float64 and never 0 or 1.
    """
    groups = token_ids.astype(np.uint64) >> np.uint64(2)
    return _gumbel_of_words(np.choose(token_ids & 3, _words(seed, position, groups)))


def rivals(scaled: Float64Array, best: int, seed: int, position: int) -> Int64Array:
    """Token ids that noise may lift as high as `best`, ascending: all but those whose sum is certainly lower.

    scaled: [vocab_size] logits over temperature. One pass of integer work over the vocabulary, and of
    logarithms over what is left: a handful.
    """
    limit = scaled[best] + gumbel(seed, position, np.array([best]))[0]
    found = np.empty(len(scaled), np.int64)
    count = cpu_kernels.find_rivals(scaled, limit, position, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, found)
    return found[:count]


def _words(seed: int, position: int | Int64Array, groups: UInt64Array) -> tuple[UInt64Array, ...]:
    key = (np.array([seed & 0xFFFFFFFF], np.uint64), np.array([seed >> 32 & 0xFFFFFFFF], np.uint64))
    zero = np.zeros(1, np.uint64)
    return philox4x32((groups, np.atleast_1d(np.asarray(position, np.uint64)), zero, zero), key)


def _gumbel_of_words(words: UInt64Array) -> Float64Array:
    return -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))


def largest(values: NDArray[np.floating], k: int) -> Int64Array:
    """Indices of the k largest values, best first, ties to the lowest index: [min(k, len)] int64."""
    candidates: Int64Array = np.arange(len(values))
    if k < len(values):
        candidates = np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    order: Int64Array = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


def _nucleus(values: Float64Array, top_p: float) -> Int64Array:
    """Indices of the smallest set of likeliest tokens whose probability reaches top_p, ascending."""
    weights = np.exp(values - values.max())
    total = weights.sum()
    # Tokens below this weight hold less than 1 - top_p together, so none of them is in the nucleus.
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(values))
    order = candidates[np.argsort(-values[candidates], kind="stable")]
    num_kept = int(np.searchsorted(np.cumsum(weights[order]), top_p * total)) + 1
    return np.sort(order[:num_kept])


def kept_token_ids(scaled: Float64Array, sampling: SamplingParams) -> Int64Array:
    """Token ids that survive min_p, then top_k, then top_p (vLLM's order), ascending.

    scaled: [vocab_size] float64 logits over temperature. Tokens that no noise could lift over the
    best one are left out too: that changes nothing but the work.
    """
    best = scaled.max()
    floor = best - _NOISE_SPAN
    if sampling.min_p > 0.0:
        floor = max(floor, best + math.log(sampling.min_p))
    if not (0 < sampling.top_k < len(scaled) or sampling.top_p < 1.0):
        return np.flatnonzero(scaled >= floor)
    # The nucleus weighs what min_p left, and only that: here the noise's own floor must not count.
    token_ids: Int64Array = np.flatnonzero(scaled >= floor) if sampling.min_p > 0.0 else np.arange(len(scaled))
    if 0 < sampling.top_k < len(token_ids):
        token_ids = np.sort(token_ids[largest(scaled[token_ids], sampling.top_k)])
    if sampling.top_p < 1.0:
        token_ids = token_ids[_nucleus(scaled[token_ids], sampling.top_p)]
    kept: Int64Array = token_ids[scaled[token_ids] >= floor]
    return kept


def filters(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens may be left out whatever their noise."""
    return sampling.min_p > 0.0 or 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the raw logits."""

    logprob: float  # of the sampled token
    top_token_ids: Int32Array  # [num_logprobs] best first
    top_logprobs: Float32Array  # [num_logprobs]


def token_logprobs(logits: Float32Array, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Log-softmax of the raw logits [vocab_size], before temperature and penalties: one token's and the top's."""
    best = logits.max()
    normalizer = np.float64(best) + np.log(np.sum(np.exp(logits - best), dtype=np.float64))
    top = largest(logits, num_logprobs) if num_logprobs else np.empty(0, np.int64)
    return TokenLogprobs(
        logprob=float(np.float32(logits[token_id] - normalizer)),
        top_token_ids=top.astype(np.int32),
        top_logprobs=(logits[top] - normalizer).astype(np.float32),
    )


class TokenSampler:
    """Samples the tokens of one request, position by position, and remembers what penalties need.

    Raises ValueError when a parameter names a token outside the vocabulary.
    """

    __slots__ = (
        "_bias_ids",
        "_biases",
        "_held_back",
        "_in_prompt",
        "_num_prompt_tokens",
        "_output_counts",
        "_vocab_size",
        "is_plain",
        "sampling",
    )

    def __init__(
        self, sampling: SamplingParams, prompt_token_ids: Int32Array, output_token_ids: Int32Array, vocab_size: int
    ) -> None:
        """prompt_token_ids: [num_prompt_tokens]; output_token_ids: [num_outputs] confirmed so far."""
        self.sampling = sampling
        self._num_prompt_tokens = len(prompt_token_ids)
        self._vocab_size = vocab_size
        self._bias_ids = _ids_inside([token_id for token_id, _ in sampling.logit_bias], vocab_size, "logit_bias")
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float64)
        stops = sorted({*sampling.eos_token_ids, *sampling.stop_token_ids}) if sampling.min_tokens else []
        self._held_back = _ids_inside(stops, vocab_size, "stop_token_ids")
        self._in_prompt: NDArray[np.bool_] | None = None
        self._output_counts: Int32Array | None = None
        if penalizes(sampling):
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[prompt_token_ids] = True
            self._output_counts = np.bincount(output_token_ids, minlength=vocab_size).astype(np.int32)
        # Whether the token is the argmax of the raw logits and nothing else is asked for.
        is_greedy = sampling.temperature == 0.0 and sampling.num_logprobs is None
        self.is_plain = is_greedy and not (penalizes(sampling) or len(self._bias_ids) or len(self._held_back))

    def append(self, token_id: int) -> None:
        """The request's next output is this token: later positions see it in their penalties."""
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def sample(self, logits: Float32Array, position: int) -> int:
        """The token at absolute `position`, whose raw logits [vocab_size] these are.

        Raises FloatingPointError when the logits are not finite, ValueError when every token is masked.
        """
        if not math.isfinite(logits.max()):
            raise FloatingPointError(f"the logits for position {position} are not finite")
        processed = self._process(logits, position)
        best = int(processed.argmax())
        if processed[best] == -math.inf:
            raise ValueError(f"every token is masked at position {position}")
        if self.sampling.temperature == 0.0:
            return best
        scaled = np.divide(processed, self.sampling.temperature, dtype=np.float64)
        if filters(self.sampling, len(scaled)):
            token_ids = kept_token_ids(scaled, self.sampling)
            if len(token_ids) > MAX_TRIED:
                kept = np.full(len(scaled), -np.inf)
                kept[token_ids] = scaled[token_ids]
                token_ids = rivals(kept, best, self.sampling.seed, position)
        else:
            token_ids = rivals(scaled, best, self.sampling.seed, position)
        noise = gumbel(self.sampling.seed, position, token_ids)
        return int(token_ids[np.argmax(scaled[token_ids] + noise)])

    def draft(self, logits: Float32Array, position: int, token_ids: Int64Array | None = None) -> int:
        """A guess at the token of `position` by the request's own parameters and noise; -1: the logits are no good.

        logits: [n] of a drafter, for `token_ids` [n] ascending (None: the whole vocabulary). Penalties count
        confirmed tokens only, and of many likely tokens only the likeliest are tried: a guess may be wrong.
        """
        if not math.isfinite(logits.max()):
            return -1
        processed: Float32Array | Float64Array = logits
        if self._output_counts is not None or len(self._held_back) or len(self._bias_ids):
            processed = self._process_some(logits, position, token_ids)
        index = int(processed.argmax())
        if self.sampling.temperature != 0.0 and processed[index] != -math.inf:
            scaled = np.divide(processed, self.sampling.temperature, dtype=np.float64)
            kept = kept_token_ids(scaled, self.sampling)
            kept = kept[largest(scaled[kept], MAX_TRIED)]
            noise = gumbel(self.sampling.seed, position, kept if token_ids is None else token_ids[kept])
            index = int(kept[np.argmax(scaled[kept] + noise)])
        return index if token_ids is None else int(token_ids[index])

    def processes(self, position: int) -> bool:
        """Whether min_tokens, logit_bias or penalties may change the logits of this position or a later one."""
        return self._output_counts is not None or len(self._bias_ids) > 0 or self._holds_back(position)

    def _holds_back(self, position: int) -> bool:
        return len(self._held_back) > 0 and position - self._num_prompt_tokens < self.sampling.min_tokens

    def _process_some(self, logits: Float32Array, position: int, token_ids: Int64Array | None) -> Float64Array:
        """`_process` of the logits of some tokens."""
        if token_ids is None:
            return self._process(logits, position).astype(np.float64)
        whole = np.full(self._vocab_size, -np.inf, np.float32)
        whole[token_ids] = logits
        return self._process(whole, position)[token_ids].astype(np.float64)

    def _process(self, logits: Float32Array, position: int) -> Float32Array | Float64Array:
        """Logits after min_tokens, logit_bias and penalties, in vLLM's order: [vocab_size]."""
        if not self.processes(position):
            return logits
        processed = logits.astype(np.float64)
        if self._holds_back(position):
            processed[self._held_back] = -math.inf
        np.add.at(processed, self._bias_ids, self._biases)
        if self._output_counts is not None and self._in_prompt is not None:
            _penalize(processed, self._in_prompt, self._output_counts, self.sampling)
        return processed


def penalizes(sampling: SamplingParams) -> bool:
    """Whether a token's logit depends on how often it stands in the request."""
    repetition = sampling.repetition_penalty != 1.0
    return repetition or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _penalize(
    logits: Float64Array, in_prompt: NDArray[np.bool_], output_counts: Int32Array, sampling: SamplingParams
) -> None:
    """Repetition penalty over prompt and output, then frequency and presence over output; in place."""
    in_output = output_counts > 0
    if sampling.repetition_penalty != 1.0:
        seen = np.flatnonzero(in_prompt | in_output)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(values > 0.0, values / penalty, values * penalty)
    repeated = np.flatnonzero(in_output)
    logits[repeated] -= sampling.frequency_penalty * output_counts[repeated] + sampling.presence_penalty


def _ids_inside(token_ids: list[int], vocab_size: int, name: str) -> Int64Array:
    """[n] int64; raises ValueError naming the field when one is no token id."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}")
    return np.array(token_ids, np.int64)


class Verified(NamedTuple):
    """What one verification returned: the accepted drafts and one token more."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one per token, or none when the request asked for none


def verify(sampler: TokenSampler, logits: Float32Array, position: int, draft_token_ids: Sequence[int]) -> Verified:
    """Sample positions `position`.. and accept the longest prefix of drafts that equals the samples.

    logits: [1 + num_drafts, vocab_size], row i for absolute position `position + i`. Sampling stops at
    the first draft that differs: what lies behind it was computed from a wrong token.
    """
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for index in range(1 + len(draft_token_ids)):
        token_id = sampler.sample(logits[index], position + index)
        sampler.append(token_id)
        token_ids.append(token_id)
        if sampler.sampling.num_logprobs is not None:
            logprobs.append(token_logprobs(logits[index], token_id, sampler.sampling.num_logprobs))
        if index < len(draft_token_ids) and draft_token_ids[index] != token_id:
            break
    return Verified(token_ids, logprobs)
