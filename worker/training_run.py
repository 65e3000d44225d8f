"""Training something that drafts, on a target's own text: batches, learning rate, saving and going on.

Every batch follows from (seed, step), so an interrupted run goes on as if it had not been. Knows nothing about what
is trained.
"""

import json
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from worker.draft_corpus import Lesson

SAVE_EVERY_S = 60.0
LOSS_EVERY = 10  # steps, of which the mean is kept: a batch is of texts alike, so one step's says little
WARM_UP = 0.02  # of all steps
LAST_RATE = 0.05  # of the learning rate
MAX_PAIRS = 1024  # of one text; what is longer is cut
POOL = 64  # texts whose lengths are sorted, so that a batch has little padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast anything is trained."""

    epochs: float = 8.0
    batch_tokens: int = 1024  # predicted tokens of one step
    learning_rate: float = 2e-3
    seed: int = 0
    autocast: bool = True  # matrix products in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """How often drafts of held-out text are right."""

    accepted: tuple[float, ...]  # [depth] share of pairs whose drafts up to this depth are all right
    coverage: float  # share of the tokens that are in the draft vocabulary

    @property
    def acceptance_length(self) -> float:
        """Tokens of one verification, the target's own included."""
        return 1.0 + sum(self.accepted)


class TrainingRun(ABC):
    """One run: its network, its optimizer and where it stands."""

    network: nn.Module

    def __init__(self, lessons: Sequence[Lesson], schedule: Schedule, path: Path) -> None:
        """path: of what is saved. Seeds the random numbers that a network begins with."""
        self._schedule, self._path = schedule, path
        self._lessons = [lesson for lesson in lessons if not lesson.is_held_out]
        self._held_out = [lesson for lesson in lessons if lesson.is_held_out]
        if not self._lessons or not self._held_out:
            numbers = f"{len(self._lessons)} texts to learn from and {len(self._held_out)} to test with"
            raise ValueError(f"{numbers}: too few")
        self._epoch_batches: dict[int, list[list[int]]] = {}
        self.num_steps = max(round(schedule.epochs * len(self._batches(0))), 1)
        self.step = 0
        self.losses: list[tuple[int, float]] = []  # (step, mean of LOSS_EVERY steps)
        self._recent: list[float] = []  # losses since
        torch.manual_seed(schedule.seed)

    def _begin(self, network: nn.Module) -> None:
        """Train this network; what an earlier run of the same settings left is taken up."""
        self._optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._resume()

    @abstractmethod
    def _loss(self, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, float]:
        """What a step makes smaller, and what is shown of it."""

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
        schedule = self._schedule
        per_epoch = len(self._batches(0))
        epoch, index = divmod(self.step, per_epoch)
        lessons = [self._lessons[i] for i in self._batches(epoch)[index]]
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.learning_rate * self._rate()
        self._optimizer.zero_grad(set_to_none=True)
        loss, shown = self._loss(lessons)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        self._recent.append(shown)
        if self.step % LOSS_EVERY == 0:
            self.losses.append((self.step, sum(self._recent) / len(self._recent)))
            self._recent = []

    def _rate(self) -> float:
        """Linear up, then a cosine down to LAST_RATE."""
        warm = max(WARM_UP * self.num_steps, 1.0)
        if self.step < warm:
            return (self.step + 1) / warm
        done = (self.step - warm) / max(self.num_steps - warm, 1.0)
        return LAST_RATE + (1.0 - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))

    def _batches(self, epoch: int) -> list[list[int]]:
        """Texts of each step of an epoch: shuffled, sorted by length in pools, cut, shuffled again."""
        if epoch in self._epoch_batches:
            return self._epoch_batches[epoch]
        rng = random.Random(f"{self._schedule.seed} {epoch}")
        order = list(range(len(self._lessons)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for first in range(0, len(order), POOL):
            pool = sorted(order[first : first + POOL], key=lambda i: (len(self._lessons[i]), i))
            batch, size = list[int](), 0
            for index in pool:
                batch.append(index)
                size += num_counted(self._lessons[index])
                if size >= self._schedule.batch_tokens:
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

    def report(self, score: Score) -> str:
        """The score and the training curve as a card shows them: Markdown."""
        depths = "\n".join(f"| {depth} | {share:.3f} |" for depth, share in enumerate(score.accepted, start=1))
        curve = "\n".join(f"| {step} | {loss:.3f} |" for step, loss in self.losses[:: max(len(self.losses) // 12, 1)])
        length = 1 + sum(score.accepted[:3])
        return f"""| draft | accepted, all before it too |
|---|---|
{depths}

Mean acceptance length {length:.2f} tokens at K = 3, {score.acceptance_length:.2f} at K = {len(score.accepted)}.

| step | loss |
|---|---|
{curve}
"""

    # ---- where it stands ----

    def save(self) -> None:
        """Keep everything that the next step depends on."""
        state = {
            "training": json.dumps(asdict(self._schedule)),
            "step": self.step,
            "losses": self.losses,
            "recent": self._recent,
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
        if json.loads(state["training"]) != json.loads(json.dumps(asdict(self._schedule))):
            raise ValueError(f"{self._path} is of a run with other settings: {state['training']}")
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], [tuple(point) for point in state["losses"]]
        self._recent = state.get("recent", [])  # runs begun before there was one go on


def num_counted(lesson: Lesson) -> int:
    """Pairs of a text that predict tokens of its answer."""
    return min(len(lesson) - 1, MAX_PAIRS) - max(lesson.num_prompt_tokens - 2, 0)
