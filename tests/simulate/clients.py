"""Clients: what they ask for, what they have got, and whether that was right. Knows nothing about how it came."""

import random
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from scheduler.request import FinishReason, Request, SamplingParams
from tests.simulate.toy import NUM_STOPPABLE, VOCABULARY, Violation, chain, ending, extend, next_token, stops
from tests.simulate.weather import MS, Weather


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a client asks for; the same in every attempt."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    max_drafts: int | None
    priority: int
    deadline_ns: int | None
    salt: int
    tenant: str
    cancel_after: int | None  # outputs
    is_poison: bool


class Client:
    """One client and its stream."""

    __slots__ = (
        "attempt", "front_end", "last_heard_ns", "num_rejections", "num_resubmissions", "outcome",
        "patience_ns", "prompt", "stream", "token_ids", "versions",
    )  # fmt: skip

    def __init__(self, prompt: Prompt, front_end: str, patience_ns: int) -> None:
        self.prompt = prompt
        self.front_end = front_end
        self.attempt = 0
        self.stream = -1
        self.token_ids: list[int] = []
        self.versions: list[int] = []
        self.outcome: str | None = None  # how it ended for the client
        self.last_heard_ns = 0
        self.patience_ns = patience_ns
        self.num_resubmissions = 0
        self.num_rejections = 0

    def request(self, stream: int) -> Request:
        """The submission of the attempt now, under a new stream number."""
        prompt = self.prompt
        return Request(
            request_id=prompt.request_id,
            attempt=self.attempt,
            front_end=self.front_end,
            stream=stream,
            prompt_token_ids=np.array(prompt.token_ids, np.int32),
            resume_token_ids=np.array(self.token_ids, np.int32),
            max_tokens=prompt.max_tokens,
            sampling=prompt.sampling,
            max_drafts=prompt.max_drafts,
            priority=prompt.priority,
            deadline_ns=prompt.deadline_ns,
            cache_salt=str(prompt.salt) if prompt.salt else "",
            tenant=prompt.tenant,
        )

    def take(self, offset: int, token_ids: list[int], versions: list[int]) -> bool:
        """Let what is new through the gate. False if something before it is missing."""
        held = len(self.token_ids)
        if offset > held:
            return False
        repeated = min(held - offset, len(token_ids))
        if self.token_ids[offset : offset + repeated] != token_ids[:repeated]:
            raise Violation(f"other tokens at offset {offset} than before", self.prompt.request_id)
        self.token_ids.extend(token_ids[repeated:])
        self.versions.extend(versions[repeated:])
        return True

    def check_stream(self, max_model_len: int) -> None:
        """At the end: the model's own tokens, all of them unless somebody gave up."""
        prompt = self.prompt
        ends = stops(prompt.sampling)
        prefix = chain(prompt.token_ids)[-1]
        who, request = prompt.request_id, self.request(-1)
        if sorted(self.versions) != self.versions:
            raise Violation(f"weights went back: {self.versions}", who)
        for offset, (token, version) in enumerate(zip(self.token_ids, self.versions, strict=True)):
            masked = offset < prompt.sampling.min_tokens
            expected = next_token(prefix, version, prompt.sampling.seed, ends, masked)
            if token != expected:
                raise Violation(f"client got {token} at offset {offset}, the model says {expected}", who)
            prefix = extend(prefix, token)
            if ending(request, self.token_ids[:offset], max_model_len) is not None and offset:
                raise Violation(f"client got tokens past the end at {offset - 1}", who)
        if self.outcome is None:
            raise Violation("the client still waits", who)
        truly = ending(request, self.token_ids, max_model_len)
        if self.outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value) and (
            truly is None or truly.value != self.outcome
        ):
            raise Violation(f"the client was told {self.outcome}, truly {truly}", who)


class Authors:
    """Make up prompts: shared prefixes, earlier conversations, or nothing in common."""

    def __init__(self, weather: Weather, rng: random.Random) -> None:
        self.weather = weather
        self.rng = rng
        self.num_written = 0
        longest = max(1, weather.prompt_tokens - 2)
        self.prefixes = [self._tokens(rng.randint(1, longest)) for _ in range(weather.shared_prefixes)]
        self.earlier: deque[Prompt] = deque(maxlen=4)
        self.conversations: list[tuple[tuple[int, ...], int]] = []  # (prompt + output, salt)

    def write(self, now_ns: int, request_id: str | None = None, salt: int | None = None) -> Prompt:
        """A new prompt; `request_id` is used again if given, with its salt."""
        weather, rng = self.weather, self.rng
        if request_id is None and self.earlier and rng.random() < weather.repeated:
            return self.repeat(rng.choice(self.earlier))
        self.num_written += 1
        if salt is None:
            salt = rng.choice((0, 0, 0, 1))
        token_ids = self._prompt_tokens(salt)
        limit = weather.config.max_model_len
        max_tokens = rng.randint(1, weather.output_tokens)
        if len(token_ids) + max_tokens > limit and rng.random() < 0.95:
            max_tokens = max(1, limit - len(token_ids))
        prompt = Prompt(
            request_id=request_id or f"r{self.num_written}",
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._sampling(max_tokens),
            max_drafts=rng.choice((None, None, None, None, None, 0, 1, 2)),
            priority=rng.choice((0, 0, 0, 1, 2)),
            deadline_ns=now_ns + rng.randint(1, 400) * MS if rng.random() < weather.urgent else None,
            salt=salt,
            tenant=f"t{salt}" if weather.config.tenant_weights else "t",
            cancel_after=rng.randint(0, max_tokens) if rng.random() < 0.12 else None,
            is_poison=rng.random() < weather.poisonous,
        )
        self.earlier.append(prompt)
        return prompt

    def repeat(self, prompt: Prompt) -> Prompt:
        """The same once more, under another id."""
        self.num_written += 1
        return replace(prompt, request_id=f"r{self.num_written}", deadline_ns=None, cancel_after=None, is_poison=False)

    def remember(self, prompt: Prompt, outputs: list[int]) -> None:
        """A conversation that may go on."""
        self.conversations.append((prompt.token_ids + tuple(outputs), prompt.salt))
        if len(self.conversations) > 6:
            self.conversations.pop(0)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(VOCABULARY), k=count))

    def _prompt_tokens(self, salt: int) -> tuple[int, ...]:
        weather, rng = self.weather, self.rng
        limit = weather.config.max_model_len - 1
        if rng.random() < weather.multi_turn:
            earlier = [tokens for tokens, owner in self.conversations if owner == salt and len(tokens) < limit - 1]
            if earlier:
                return rng.choice(earlier) + self._tokens(rng.choice((0, 1, 1, 2)))
        if self.prefixes and rng.random() < 0.7:
            prefix = rng.choice(self.prefixes)
            return prefix + self._tokens(rng.randint(0, max(0, weather.prompt_tokens - len(prefix))))
        return self._tokens(rng.randint(1, weather.prompt_tokens))

    def _sampling(self, max_tokens: int) -> SamplingParams:
        rng = self.rng
        stop_ids = tuple(rng.sample(range(1, NUM_STOPPABLE), rng.choice((0, 0, 1, 2))))
        return SamplingParams(
            seed=rng.randrange(4),
            eos_token_ids=(0,) if rng.random() < 0.6 else (),
            stop_token_ids=stop_ids,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        )
