"""`slipstream distill-draft`: a tiny draft model for any target, from the target's own text, on this machine.

Samples answers as `slipstream train-head` does, or takes those of a run of it; trains, measures on held-out prompts
and writes a Hugging Face directory with a card. Every stage goes on where an interrupted run stopped.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.errors import ConfigError
from cluster.progress import Display
from cluster.sampled_texts import TEMPERATURES, TextRequest, run_directory, sample_texts
from worker.draft_corpus import read_lessons
from worker.draft_distillation import Distillation, DraftTrainer
from worker.hf_model import read_any_config, read_shared
from worker.training_run import Score

SCORED_DRAFTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What the command line asks for."""

    texts: TextRequest
    texts_of: Path | None  # the run of an earlier training for the same target, whose answers are taken; None: its own
    output: Path
    training: Distillation
    threads: int


def distill_draft(request: DraftRequest, display: Display) -> Score:
    """Run every stage that is not done yet. ConfigError for what the user can change."""
    texts, run = request.texts, run_directory(request.output)
    texts_run = request.texts_of or run
    run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(request.threads)
    config = read_any_config(texts.directory)
    try:
        sample_texts(texts, texts_run, display)
        with display.phase("Reading hidden states"):
            shared = read_shared(texts.directory, config)
            trainer = DraftTrainer(config, shared, read_lessons(texts_run), request.training, run)
        with display.bar(f"Training, {trainer.num_steps} steps", trainer.num_steps) as advance:
            trainer.run(advance)
        with display.phase("Measuring on held-out prompts"):
            score = trainer.score(SCORED_DRAFTS)
    except ValueError as error:
        raise ConfigError(f"distill-draft: {error}") from error
    trainer.export(request.output, texts.directory)
    (request.output / "README.md").write_text(_card(request, trainer, score))
    return score


def _card(request: DraftRequest, trainer: DraftTrainer, score: Score) -> str:
    """How the model was made and what it was measured to do."""
    training, texts = request.training, request.texts
    return f"""# A draft model for {texts.name}

Made by `slipstream distill-draft` from the target's own answers: at least {texts.num_tokens} tokens at temperatures
{", ".join(map(str, TEMPERATURES))}, {training.epochs:g} epochs ({trainer.num_steps} steps).

A Llama of {training.num_layers} layers of {training.hidden_size}, with the target's tokenizer and whole vocabulary.
Serve it with `--speculative-config '{{"method": "draft_model", "model": "{request.output}"}}'`.

Measured on held-out prompts of the same kinds, greedy:

{trainer.report(score)}"""
