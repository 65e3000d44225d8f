"""What a stream must be, found the slow way, and a drafter that knows it.

`undisturbed` decodes one request alone, one token at a time, with no scheduler, no runner and no drafts:
its bookkeeping shares nothing with theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scheduler.request import FinishReason, SamplingParams
from scheduler.step import Int32Array
from worker.attention import KVCache
from worker.batch import Batch
from worker.drafter import Drafter
from worker.model import Model, ModelConfig
from worker.rows import RowState
from worker.sampler import TokenLogprobs, TokenSampler, philox4x32, token_logprobs
from worker.sanitizer import prefix_hashes


@dataclass(slots=True, eq=False)
class Stream:
    """One request's undisturbed run."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # per token, when asked for
    reason: FinishReason = FinishReason.LENGTH


def undisturbed(model: Model, prompt_token_ids: Sequence[int], sampling: SamplingParams, max_tokens: int) -> Stream:
    """Decode one request alone: the prompt in one piece, then token by token, in the first blocks of the pool."""
    prompt = np.asarray(prompt_token_ids, np.int32)
    sampler = TokenSampler(sampling, prompt, np.empty(0, np.int32), model.config.vocab_size)
    stream = Stream()
    pending = [int(token) for token in prompt]
    num_tokens = 0
    while len(stream.token_ids) < max_tokens:
        batch = single_row_batch(pending, num_tokens, model.kv_cache.block_size)
        num_tokens += len(pending)
        logits = model.logits(model.forward(batch)[-1:])[0].numpy()
        token = sampler.sample(logits, num_tokens)
        sampler.append(token)
        stream.token_ids.append(token)
        if sampling.num_logprobs is not None:
            stream.logprobs.append(token_logprobs(logits, token, sampling.num_logprobs))
        ends = token in sampling.eos_token_ids or token in sampling.stop_token_ids
        if ends and len(stream.token_ids) >= sampling.min_tokens:
            stream.reason = FinishReason.STOP
            break
        pending = [token]
    return stream


def single_row_batch(token_ids: Sequence[int], num_computed_tokens: int, block_size: int) -> Batch:
    """These tokens of one request that owns blocks 0, 1, 2, ...; logits wanted for the last."""
    stop = num_computed_tokens + len(token_ids)
    positions = torch.arange(num_computed_tokens, stop)
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=positions,
        slot_mapping=positions.clone(),
        cu_seqlens_q=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        seq_lens=torch.tensor([stop], dtype=torch.int32),
        block_table=torch.arange(-(-stop // block_size), dtype=torch.int32)[None],
        logits_indices=torch.tensor([len(token_ids) - 1]),
    )


class OracleDrafter(Drafter):
    """Knows how every request goes on, and spoils each draft with some probability.

    Whether the draft for a position is spoiled depends on (seed, request, position) alone, so it is the
    same whenever and however often it is asked.
    """

    def __init__(self, *, max_drafts: int, vocab_size: int, spoil: float, seed: int = 0) -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._spoil = spoil
        self._seed = seed
        self._known: dict[str, tuple[int, list[int]]] = {}  # request_id -> number, prompt + outputs
        self.num_proposed = 0

    def learn(self, continuations: Mapping[str, Sequence[int]]) -> None:
        """request_id -> prompt + outputs."""
        for request_id, token_ids in continuations.items():
            self._known[request_id] = (len(self._known), [int(token) for token in token_ids])

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """The true continuation, some tokens of it spoiled; nothing past what is known."""
        proposed = [
            self._propose(row, min(wanted, self.max_drafts)) for row, wanted in zip(rows, num_propose, strict=True)
        ]
        self.num_proposed += sum(map(len, proposed))
        return proposed

    def _propose(self, row: RowState, wanted: int) -> list[int]:
        number, token_ids = self._known.get(row.request_id, (0, []))
        known = token_ids[: row.num_tokens]
        assert row.token_ids[: len(known)].tolist() == known, f"{row.request_id} left its undisturbed stream"
        drafts = token_ids[row.num_tokens : row.num_tokens + wanted]
        return [self._spoiled(token, number, row.num_tokens + index) for index, token in enumerate(drafts)]

    def _spoiled(self, token_id: int, number: int, position: int) -> int:
        columns = [np.array([value], np.uint64) for value in (position, number, 0, 1, self._seed, 0)]
        words = philox4x32((columns[0], columns[1], columns[2], columns[3]), (columns[4], columns[5]))
        if int(words[0][0]) >= self._spoil * 2**32:
            return token_id
        return (token_id + 1 + int(words[1][0]) % (self._vocab_size - 1)) % self._vocab_size


class ToyModel(Model):
    """A model whose KV is the tokens themselves: logits depend on exactly what the block table leads to.

    Instant, and right or wrong to the bit: a misplaced or stale slot anywhere in a row's context changes
    every logit of that row. The last token weighs more than the rest, so that n-gram drafts come true.
    """

    def __init__(
        self, *, vocab_size: int = 64, num_blocks: int, block_size: int, last_token_weight: float = 4.0
    ) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=2,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
        )
        self.kv_cache = KVCache(
            num_layers=1, num_blocks=num_blocks, block_size=block_size, num_kv_heads=1, head_dim=1, dtype=torch.float64
        )
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.num_forwards = 0
        self._weight = last_token_weight

    def forward(self, batch: Batch) -> torch.Tensor:
        """[num_tokens, 2] float64: a hash of the context, the token itself. Writes tokens as keys and values."""
        self.num_forwards += 1
        keys = self.kv_cache.key.view(-1)
        keys[batch.slot_mapping] = batch.token_ids.double()
        hidden = np.empty((len(batch.token_ids), 2))
        bounds = batch.cu_seqlens_q.tolist()
        for index, seq_len in enumerate(batch.seq_lens.tolist()):
            positions = np.arange(seq_len)
            blocks = batch.block_table[index].numpy().astype(np.int64)
            block_size = self.kv_cache.block_size
            context = keys.numpy()[blocks[positions // block_size] * block_size + positions % block_size]
            with np.errstate(invalid="ignore"):
                hashes = (prefix_hashes(0, context.astype(np.int64)) >> np.uint64(32)).astype(np.float64)
            hashes[np.cumsum(np.isnan(context)) > 0] = np.nan
            num_queries = bounds[index + 1] - bounds[index]
            hidden[bounds[index] : bounds[index + 1], 0] = hashes[seq_len - num_queries :]
            hidden[bounds[index] : bounds[index + 1], 1] = context[seq_len - num_queries :]
        return torch.from_numpy(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32."""
        rows = hidden.numpy().astype(np.int64)
        by_context = self._noise(rows[:, 0], 1)
        return torch.from_numpy((by_context + self._weight * self._noise(rows[:, 1], 2)).astype(np.float32))

    def _noise(self, numbers: np.ndarray, stream: int) -> np.ndarray:
        """[n, vocab_size] float64 in [0, 1), fixed by each number."""
        counter = (
            np.arange(self.config.vocab_size, dtype=np.uint64)[None, :],
            numbers.astype(np.uint64)[:, None],
            np.zeros((1, 1), np.uint64),
            np.zeros((1, 1), np.uint64),
        )
        words = philox4x32(counter, (np.array([stream], np.uint64), np.zeros(1, np.uint64)))
        return words[0].astype(np.float64) * 2.0**-32


def tokens(*token_ids: int) -> Int32Array:
    """[n] int32."""
    return np.array(token_ids, np.int32)
