"""Training an EAGLE-3 head on the target's own text, with the training-time test.

At depth d the head reads its own outputs of depth d - 1 in place of hidden states, and attends to true pairs
before the draft begins and to its own pairs since: what happens when it drafts (Li et al. 2025, arXiv
2503.01840, section 3). The loss is the cross-entropy against the target's distribution over the draft
vocabulary. Every batch follows from (seed, step), so an interrupted run goes on as if it had not been.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from worker.architecture import ModelConfig
from worker.draft_corpus import Lesson
from worker.rope import Rope, RopeConfig

SAVE_EVERY_S = 60.0
WARM_UP = 0.02  # of all steps
LAST_RATE = 0.05  # of the learning rate
DEPTH_DECAY = 0.8  # weight of each further depth in the loss
MAX_PAIRS = 1024  # of one text; what is longer is cut
POOL = 64  # texts whose lengths are sorted, so that a batch has little padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a head is trained."""

    state_layers: tuple[int, ...]
    draft_vocab_size: int = 8192
    epochs: float = 8.0
    depth: int = 3  # of the training-time test
    shallow_share: float = 0.65  # of the steps, the first ones: depth 1, at less than half the cost
    batch_tokens: int = 1024  # predicted tokens of one step
    learning_rate: float = 2e-3
    seed: int = 0
    autocast: bool = True  # matrix products in bfloat16


class HeadNetwork(nn.Module):
    """The head as it is trained: float32 parameters, whole sequences, any depth."""

    def __init__(self, config: ModelConfig, num_states: int, scale: torch.Tensor) -> None:
        """scale: [num_states * hidden_size], of the hidden states."""
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._config = config
        self._scale = scale
        self.fc = nn.Linear(num_states * hidden, hidden, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(4)
        )
        self.q_proj = nn.Linear(2 * hidden, queries, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(2 * hidden, keys, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self._rope = Rope(
            RopeConfig(theta=config.rope.theta),
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=MAX_PAIRS,
        )

    def depths(self, states: torch.Tensor, embedded: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """The outputs of each depth: [B, L, hidden_size] each; those of depth d are of no use before pair d.

        states: [B, L, num_states * hidden_size]; embedded: [B, L, hidden_size] of the tokens one further on.
        """
        length = states.shape[1]
        cos, sin = (x[None, :, 0] for x in self._rope(torch.arange(length)))
        features = self.fc(states * self._scale).float()
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(depth):
            if step:
                features = F.pad(outputs[-1], (0, 0, 1, 0))[:, :-1]
            normed = self.hidden_norm(features)
            inputs = torch.cat((self.input_layernorm(embedded), normed), -1)
            query, key, value = (self._heads(proj(inputs)) for proj in (self.q_proj, self.k_proj, self.v_proj))
            keys.append(_turn(key, cos, sin))
            values.append(value)
            attended = self._attend(_turn(query, cos, sin), keys, values)
            residual = features + self.o_proj(attended.transpose(1, 2).flatten(2))
            x = self.post_attention_layernorm(residual)
            outputs.append(residual + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
        return outputs

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, head_dim]."""
        heads: torch.Tensor = x.unflatten(-1, (-1, self._config.head_dim)).transpose(1, 2)
        return heads

    def _attend(
        self, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Attention of the last depth: pair p sees true pairs up to p - depth, then one pair of each depth since."""
        step, length = len(keys) - 1, query.shape[2]
        group = self._config.num_heads // self._config.num_kv_heads
        scores = torch.einsum("bhqd,bhkd->bhqk", query, keys[0].repeat_interleave(group, 1))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - step)
        scores = scores.float().masked_fill(hidden, -torch.inf)
        own: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        for depth in range(1, step + 1):
            # Pair p - (step - depth) of that depth stands beside pair p.
            back = step - depth
            key, value = (
                F.pad(x[depth].repeat_interleave(group, 1), (0, 0, back, 0))[:, :, :length] for x in (keys, values)
            )
            score = (query * key).sum(-1).float()
            own.append(score.masked_fill(torch.arange(length) < back, -torch.inf)[..., None])
            own_values.append(value)
        weights = (torch.cat([scores, *own], -1) * self._config.head_dim**-0.5).softmax(-1).to(query.dtype)
        out = torch.einsum("bhqk,bhkd->bhqd", weights[..., :length], values[0].repeat_interleave(group, 1))
        for index, value in enumerate(own_values):
            out = out + weights[..., length + index, None] * value
        return out

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters under their `speculators` names; the scale of the hidden states becomes part of fc."""
        layer = "layers.0."
        parts = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
        tensors = {"fc.weight": self.fc.weight * self._scale, "norm.weight": self.norm.weight}
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = getattr(self, name).weight
        for part, names in parts.items():
            tensors |= {f"{layer}{part}.{name}.weight": getattr(self, name).weight for name in names}
        return {name: tensor.detach() for name, tensor in tensors.items()}


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [B, heads, L, head_dim]; cos and signed sin: [1, L, head_dim]."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """How often drafts of held-out text are right."""

    accepted: tuple[float, ...]  # [depth] share of pairs whose drafts up to this depth are all right
    coverage: float  # share of the tokens that are in the draft vocabulary

    @property
    def acceptance_length(self) -> float:
        """Tokens of one verification, the target's own included."""
        return 1.0 + sum(self.accepted)


class HeadTrainer:
    """One run: its network, its optimizer and where it stands."""

    def __init__(
        self,
        config: ModelConfig,
        shared: Mapping[str, torch.Tensor],
        lessons: Sequence[Lesson],
        training: Training,
        directory: Path,
    ) -> None:
        """shared: the target's `embed_tokens.weight`, `lm_head.weight` and `norm.weight`.

        directory: of the run. What an earlier run of the same settings left there is taken up.
        """
        self._config, self._training = config, training
        self._lessons = [lesson for lesson in lessons if not lesson.is_held_out]
        self._held_out = [lesson for lesson in lessons if lesson.is_held_out]
        if not self._lessons or not self._held_out:
            numbers = f"{len(self._lessons)} texts to learn from and {len(self._held_out)} to test with"
            raise ValueError(f"{numbers}: too few")
        self._path = directory / "training.pt"
        self._embedding = shared["embed_tokens.weight"].float()
        self.token_ids = _frequent(self._lessons, config.vocab_size, training.draft_vocab_size)
        self._draft_of = torch.full((config.vocab_size,), -1)
        self._draft_of[self.token_ids] = torch.arange(len(self.token_ids))
        self._rows = shared["lm_head.weight"][self.token_ids].float()
        torch.manual_seed(training.seed)
        self.network = HeadNetwork(config, len(training.state_layers), _scale(self._lessons))
        with torch.no_grad():
            self.network.norm.weight.copy_(shared["norm.weight"])
        self._optimizer = torch.optim.AdamW(self.network.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._epoch_batches: dict[int, list[list[int]]] = {}
        self.num_steps = max(round(training.epochs * len(self._batches(0))), 1)
        self.step = 0
        self.losses: list[tuple[int, float]] = []  # (step, loss of its first depth)
        self._resume()

    # ---- the run ----

    def run(self, progress: Callable[[int], None], *, stop_after: int | None = None) -> None:
        """Train to the end, or up to a step. Interrupted, it saves where it stands."""
        last = self.num_steps if stop_after is None else min(stop_after, self.num_steps)
        saved_s = time.monotonic()
        try:
            while self.step < last:
                self._train_step()
                progress(self.step)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    self.save()
                    saved_s = time.monotonic()
        finally:
            self.save()

    def _train_step(self) -> None:
        training = self._training
        per_epoch = len(self._batches(0))
        epoch, index = divmod(self.step, per_epoch)
        lessons = [self._lessons[i] for i in self._batches(epoch)[index]]
        depth = 1 if self.step < training.shallow_share * self.num_steps else training.depth
        for group in self._optimizer.param_groups:
            group["lr"] = training.learning_rate * self._rate()
        self._optimizer.zero_grad(set_to_none=True)
        losses = self._losses(lessons, depth)
        sum(loss * DEPTH_DECAY**d for d, loss in enumerate(losses)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        if self.step % 10 == 0:
            self.losses.append((self.step, float(losses[0].detach())))

    def _rate(self) -> float:
        """Linear up, then a cosine down to LAST_RATE."""
        warm = max(WARM_UP * self.num_steps, 1.0)
        if self.step < warm:
            return (self.step + 1) / warm
        done = (self.step - warm) / max(self.num_steps - warm, 1.0)
        return LAST_RATE + (1.0 - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))

    def _losses(self, lessons: Sequence[Lesson], depth: int) -> list[torch.Tensor]:
        """The mean cross-entropy of each depth."""
        batch = _Padded(lessons)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._training.autocast):
            outputs = self.network.depths(batch.states, self._embedding[batch.next_token_ids], depth)
            losses = []
            for d, output in enumerate(outputs):
                counts = batch.counts.clone()
                counts[:, :d] = False
                with torch.no_grad():
                    wanted = (batch.hidden[counts] @ self._rows.T).float().softmax(-1)
                logits = self.network.norm(output[counts]) @ self._rows.T
                losses.append(F.cross_entropy(logits.float(), wanted))
        return losses

    def _batches(self, epoch: int) -> list[list[int]]:
        """Texts of each step of an epoch: shuffled, sorted by length in pools, cut, shuffled again."""
        if epoch in self._epoch_batches:
            return self._epoch_batches[epoch]
        rng = random.Random(f"{self._training.seed} {epoch}")
        order = list(range(len(self._lessons)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for first in range(0, len(order), POOL):
            pool = sorted(order[first : first + POOL], key=lambda i: (len(self._lessons[i]), i))
            batch, size = list[int](), 0
            for index in pool:
                batch.append(index)
                size += num_counted(self._lessons[index])
                if size >= self._training.batch_tokens:
                    batches.append(batch)
                    batch, size = [], 0
            if batch:
                batches.append(batch)
        rng.shuffle(batches)
        if epoch:  # every epoch has as many steps as the first: a step's number says its epoch
            count = len(self._batches(0))
            batches = [batches[i % len(batches)] for i in range(count)]
        self._epoch_batches = {0: self._epoch_batches.get(0, batches), epoch: batches}
        return batches

    # ---- where it stands ----

    def save(self) -> None:
        """Keep everything that the next step depends on."""
        state = {
            "training": json.dumps(asdict(self._training)),
            "step": self.step,
            "losses": self.losses,
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        part = self._path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self._path)

    def _resume(self) -> None:
        if not self._path.is_file():
            return
        state = torch.load(self._path, weights_only=True)
        if state["training"] != json.dumps(asdict(self._training)):
            raise ValueError(f"{self._path} is of a run with other settings: {state['training']}")
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], [tuple(point) for point in state["losses"]]

    # ---- what came of it ----

    @torch.no_grad()
    def score(self, depth: int) -> Score:
        """Greedy drafts of held-out text beside the text, which the target chose greedily."""
        right = torch.zeros(depth)
        total = covered = 0
        for lesson in self._held_out:
            batch = _Padded([lesson])
            outputs = self.network.depths(batch.states, self._embedding[batch.next_token_ids], depth)
            targets = self._draft_of[batch.token_ids[0, 2:]]  # pair p predicts token p + 2
            hits = []
            for d, output in enumerate(outputs):
                drafts = (self.network.norm(output[0, : len(targets)]) @ self._rows.T).argmax(-1)
                # Of a draft that begins at pair p, depth d is at pair p + d.
                hits.append(F.pad((drafts == targets)[d:], (0, d)))
            counts = batch.counts[0, : len(targets)]
            counts[max(len(counts) - depth + 1, 0) :] = False
            total += int(counts.sum())
            covered += int((targets[counts] >= 0).sum())
            right += torch.stack(hits).cumprod(0)[:, counts].sum(1)
        return Score(accepted=tuple((right / max(total, 1)).tolist()), coverage=covered / max(total, 1))

    def export(self, directory: Path, *, target_name: str, architecture: str, num_drafts: int) -> None:
        """The head in the `speculators` layout. What the target has too (embeddings, output rows) is left out."""
        config = self._config
        directory.mkdir(parents=True, exist_ok=True)
        is_frequent = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_frequent[self.token_ids] = True
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in self.network.tensors().items()}
        tensors |= {"d2t": self.token_ids - torch.arange(len(self.token_ids)), "t2d": is_frequent}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        verifier = {"name_or_path": target_name, "architectures": [architecture]}
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": num_drafts,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        layer = {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        }
        settings = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": verifier,
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": len(self.token_ids),
            "eagle_aux_hidden_state_layer_ids": list(self._training.state_layers),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
        }
        (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


class _Padded:
    """Several texts side by side, L pairs each."""

    def __init__(self, lessons: Sequence[Lesson]) -> None:
        length = min(max(map(len, lessons)) - 1, MAX_PAIRS)

        def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence([part[: length + 1] for part in parts], batch_first=True)

        self.token_ids = padded([lesson.token_ids for lesson in lessons])  # [B, L + 1]
        self.next_token_ids = self.token_ids[:, 1:]
        self.states = padded([lesson.states for lesson in lessons])[:, :-1].float()
        # The hidden state at p + 1 decides what pair p must predict.
        self.hidden = padded([lesson.hidden for lesson in lessons])[:, 1:].float()
        pairs = torch.arange(length)[None]
        starts = torch.tensor([[lesson.num_prompt_tokens - 2] for lesson in lessons])
        stops = torch.tensor([[min(len(lesson) - 1, length)] for lesson in lessons])
        self.counts = (pairs >= starts) & (pairs < stops)  # [B, L] pairs that predict tokens of the answer


def num_counted(lesson: Lesson) -> int:
    """Pairs of a text that predict tokens of its answer."""
    return min(len(lesson) - 1, MAX_PAIRS) - max(lesson.num_prompt_tokens - 2, 0)


def _frequent(lessons: Sequence[Lesson], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that stand most often in these texts, ascending; ties to the lowest."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for lesson in lessons:
        counts += torch.bincount(lesson.token_ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def _scale(lessons: Sequence[Lesson]) -> torch.Tensor:
    """One over the root mean square of each feature."""
    total = torch.zeros(lessons[0].states.shape[1])
    num_tokens = 0
    for lesson in lessons[:512]:
        total += lesson.states.float().square().sum(0)
        num_tokens += len(lesson)
    return (total / num_tokens + 1e-6).rsqrt()
