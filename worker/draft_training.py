"""Training an EAGLE-3 head on the target's own text, with the training-time test.

At depth d the head reads its own outputs of depth d - 1 in place of hidden states, and attends to true pairs
before the draft begins and to its own pairs since: what happens when it drafts (Li et al. 2025, arXiv
2503.01840, section 3). The loss is the cross-entropy against the target's distribution over the draft
vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from worker.architecture import ModelConfig
from worker.draft_corpus import Lesson, frequent_tokens
from worker.rope import Rope, RopeConfig
from worker.training_run import MAX_PAIRS, Schedule, Score, TrainingRun

DEPTH_DECAY = 0.8  # weight of each further depth in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Schedule):
    """How a head is trained."""

    state_layers: tuple[int, ...]
    draft_vocab_size: int = 8192
    depth: int = 3  # of the training-time test
    shallow_share: float = 0.65  # of the steps, the first ones: depth 1, at less than half the cost


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


class HeadTrainer(TrainingRun):
    """The training of a head."""

    network: HeadNetwork

    def __init__(
        self,
        config: ModelConfig,
        shared: Mapping[str, torch.Tensor],
        lessons: Sequence[Lesson],
        training: Training,
        directory: Path,
    ) -> None:
        """shared: the target's `embed_tokens.weight` and `lm_head.weight`, and `norm.weight` if it has such a norm.

        directory: of the run. What an earlier run of the same settings left there is taken up.
        """
        super().__init__(lessons, training, directory / "training.pt")
        self._config, self._training = config, training
        self._embedding = shared["embed_tokens.weight"].float()
        self.token_ids = frequent_tokens(self._lessons, config.vocab_size, training.draft_vocab_size)
        self._draft_of = torch.full((config.vocab_size,), -1)
        self._draft_of[self.token_ids] = torch.arange(len(self.token_ids))
        self._rows = shared["lm_head.weight"][self.token_ids].float()
        self.network = HeadNetwork(config, len(training.state_layers), _scale(self._lessons))
        if "norm.weight" in shared:
            with torch.no_grad():
                self.network.norm.weight.copy_(shared["norm.weight"])
        self._begin(self.network)

    def _loss(self, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, float]:
        """Of all depths together; the first one's is shown."""
        training = self._training
        depth = 1 if self.step < training.shallow_share * self.num_steps else training.depth
        losses = self._losses(lessons, depth)
        return torch.stack([loss * DEPTH_DECAY**d for d, loss in enumerate(losses)]).sum(), float(losses[0].detach())

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


def _scale(lessons: Sequence[Lesson]) -> torch.Tensor:
    """One over the root mean square of each feature."""
    total = torch.zeros(lessons[0].states.shape[1])
    num_tokens = 0
    for lesson in lessons[:512]:
        total += lesson.states.float().square().sum(0)
        num_tokens += len(lesson)
    return (total / num_tokens + 1e-6).rsqrt()
