"""`slipstream train-head`: an EAGLE-3 head for any target, from the target's own text, on this machine.

Samples answers with the in-process engine, keeps the target's hidden states of them, trains, measures on
held-out prompts and writes the head with a card. Every stage goes on where an interrupted run stopped.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.errors import ConfigError
from cluster.progress import Display
from cluster.sampled_texts import TEMPERATURES, TextRequest, run_directory, sample_texts
from worker.draft_corpus import read_lessons
from worker.draft_training import HeadTrainer, Training
from worker.hf_model import read_any_config, read_shared
from worker.training_run import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """What the command line asks for."""

    texts: TextRequest
    output: Path
    training: Training
    threads: int


def train_head(request: HeadRequest, display: Display) -> Score:
    """Run every stage that is not done yet. ConfigError for what the user can change."""
    texts, run = request.texts, run_directory(request.output)
    torch.set_num_threads(request.threads)
    config = read_any_config(texts.directory)
    try:
        sample_texts(texts, run, display)
        with display.phase("Reading hidden states"):
            shared = read_shared(texts.directory, config)
            trainer = HeadTrainer(config, shared, read_lessons(run), request.training, run)
        with display.bar(f"Training, {trainer.num_steps} steps", trainer.num_steps) as advance:
            trainer.run(advance)
        with display.phase("Measuring on held-out prompts"):
            score = trainer.score(max(request.training.depth, 4))
    except ValueError as error:
        raise ConfigError(f"train-head: {error}") from error
    trainer.export(
        request.output, target_name=texts.name, architecture=config.architecture, num_drafts=request.training.depth
    )
    (request.output / "README.md").write_text(_card(request, trainer, score))
    return score


def _card(request: HeadRequest, trainer: HeadTrainer, score: Score) -> str:
    """How the head was made and what it was measured to do."""
    training = request.training
    return f"""# An EAGLE-3 draft head for {request.texts.name}

Made by `slipstream train-head` from at least {request.texts.num_tokens} tokens of the target's own answers at
temperatures {", ".join(map(str, TEMPERATURES))}, {training.epochs:g} epochs ({trainer.num_steps} steps),
training-time test of depth {training.depth}, hidden states of layers {", ".join(map(str, training.state_layers))},
{len(trainer.token_ids)} draft tokens. Layout: speculators (eagle3). Embeddings and output rows are the target's own and
not stored.

Measured on held-out prompts of the same kinds, greedy, draft tokens covering {score.coverage:.1%} of the text:

{trainer.report(score)}"""
