"""Training a small draft model by distillation: the target's distribution at each position of its own text.

A Llama of a few narrow layers with the target's whole vocabulary, its output rows tied to its embeddings, which
begin as the target's, projected on their principal directions. The loss is the cross-entropy against the target's
distribution, over the most frequent tokens and, in each step, a few others that stand for the rest: a whole vocabulary
would cost five times as much. Saved as a Hugging Face directory, which anything that loads a model loads.
"""

import json
import math
import shutil
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

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(Schedule):
    """A draft model's shape, and how it is trained."""

    num_layers: int = 2
    hidden_size: int = 192
    intermediate_size: int = 512
    head_dim: int = 64
    num_frequent: int = 6144  # tokens that are in every step's loss
    num_drawn: int = 2048  # of the others, in one step's

    def config(self, target: ModelConfig) -> ModelConfig:
        """Of the draft model. ValueError where the sizes do not fit."""
        if self.hidden_size % self.head_dim:
            raise ValueError(f"hidden size {self.hidden_size} is not a multiple of the head size {self.head_dim}")
        num_heads = self.hidden_size // self.head_dim
        return ModelConfig(
            vocab_size=target.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=self.head_dim,
            max_position_embeddings=target.max_position_embeddings,
            rope=RopeConfig(theta=target.rope.theta),
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
        )


class Layer(nn.Module):
    """One layer of the draft model, under its Hugging Face names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, queries = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(2)
        )
        projections = {f"{name}_proj": nn.Linear(hidden, queries, bias=False) for name in "qkv"}
        self.self_attn = nn.ModuleDict(projections | {"o_proj": nn.Linear(queries, hidden, bias=False)})
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self._head_dim = config.head_dim

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, L, hidden_size] to the same; cos and signed sin: [L, head_dim]."""
        normed = self.input_layernorm(x)
        query, key, value = (
            self.self_attn[f"{name}_proj"](normed).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for name in "qkv"
        )
        query, key = ((y * cos + y.roll(self._head_dim // 2, -1) * sin).to(value.dtype) for y in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        added: torch.Tensor = self.mlp["down_proj"](gated)
        return x + added


class DraftNetwork(nn.Module):
    """The draft model as it is trained: float32 parameters, whole sequences."""

    def __init__(self, config: ModelConfig, embedding: torch.Tensor) -> None:
        """embedding: [vocab_size, target_hidden_size] of the target."""
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(_projected(embedding, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._rope = Rope(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=MAX_PAIRS,
        )

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, L, hidden_size] after the final norm, of tokens [B, L]."""
        cos, sin = (x[:, 0] for x in self._rope(torch.arange(token_ids.shape[1])))
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of hidden states [n, hidden_size]."""
        return hidden @ self.embed_tokens.weight.T


def _projected(embedding: torch.Tensor, size: int) -> torch.Tensor:
    """Rows on the directions in which they differ most, at a scale at which logits begin small: [n, size]."""
    rows = embedding.float()
    if size >= rows.shape[1]:
        rows = F.pad(rows, (0, size - rows.shape[1]))
    else:
        centered = rows - rows.mean(0)
        rows = centered @ torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -size:]
    return rows * (0.5 / math.sqrt(size)) / rows.square().mean().sqrt()


class DraftTrainer(TrainingRun):
    """The training of a draft model."""

    network: DraftNetwork

    def __init__(
        self,
        target: ModelConfig,
        shared: Mapping[str, torch.Tensor],
        lessons: Sequence[Lesson],
        training: Distillation,
        directory: Path,
    ) -> None:
        """shared: the target's `embed_tokens.weight` and `lm_head.weight`. directory: of the run."""
        super().__init__(lessons, training, directory / "distillation.pt")
        self.config, self._training = training.config(target), training
        self._rows = shared["lm_head.weight"].float()
        is_frequent = torch.zeros(target.vocab_size, dtype=torch.bool)
        is_frequent[frequent_tokens(self._lessons, target.vocab_size, training.num_frequent)] = True
        self._frequent, self._rare = is_frequent.nonzero()[:, 0], (~is_frequent).nonzero()[:, 0]
        self.network = DraftNetwork(self.config, shared["embed_tokens.weight"])
        self._begin(self.network)

    def _loss(self, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, float]:
        """The mean cross-entropy of the positions that decide tokens of an answer."""
        token_ids, counts = _side_by_side(lessons)
        states = torch.cat([lesson.hidden[_answer(lesson)] for lesson in lessons]).float()
        candidates, gains = self._candidates()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._training.autocast):
            with torch.no_grad():
                wanted = ((states @ self._rows[candidates].T).float() + gains).softmax(-1)
            logits = self.network(token_ids)[counts] @ self.network.embed_tokens.weight[candidates].T
            loss = F.cross_entropy(logits.float() + gains, wanted)
        # One that stands for many is as unlikely as each of them: a constant, but the loss over all tokens has it.
        return loss, float(loss.detach() + (wanted @ gains).mean())

    def _candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] tokens of this step's softmax, and [n] what is added to logits of one that stands for many."""
        generator = torch.Generator().manual_seed(self._training.seed * 1_000_003 + self.step)
        drawn = self._rare[torch.randperm(len(self._rare), generator=generator)[: self._training.num_drawn]]
        gains = torch.zeros(len(self._frequent) + len(drawn))
        if len(drawn):
            gains[len(self._frequent) :] = math.log(len(self._rare) / len(drawn))
        return torch.cat((self._frequent, drawn)), gains

    @torch.no_grad()
    def score(self, depth: int) -> Score:
        """Greedy drafts of held-out text beside the text, which the target chose greedily."""
        right, total = torch.zeros(depth), 0
        for lesson in self._held_out:
            token_ids, counts = _side_by_side([lesson])
            drafts = self.network.logits(self.network(token_ids)[counts]).argmax(-1)
            hits = (drafts == lesson.token_ids[1:][_answer(lesson)]).float()
            # Drafts that are right are the text, so what follows them was read as it would be drafted.
            windows = hits.unfold(0, depth, 1) if len(hits) >= depth else hits[:0].reshape(0, depth)
            right += windows.cumprod(1).sum(0)
            total += len(windows)
        return Score(accepted=tuple((right / max(total, 1)).tolist()), coverage=1.0)

    def export(self, directory: Path, target: Path) -> None:
        """A Hugging Face directory, with the tokenizer of the target's."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value.to(torch.bfloat16) for name, value in self.network.state_dict().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = self.config
        settings = {
            "architectures": [config.architecture],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope.theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids),
        }
        (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, directory / name)


def _answer(lesson: Lesson) -> slice:
    """Positions that decide tokens of the answer, as far as texts are looked at."""
    return slice(max(lesson.num_prompt_tokens - 1, 0), min(len(lesson) - 1, MAX_PAIRS))


def _side_by_side(lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L] and which of them decide a token of an answer [B, L], text after text."""
    length = min(max(map(len, lessons)), MAX_PAIRS)
    texts = [lesson.token_ids[:length] for lesson in lessons]
    counts = torch.zeros(len(lessons), length, dtype=torch.bool)
    for row, lesson in enumerate(lessons):
        counts[row, _answer(lesson)] = True
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), counts
