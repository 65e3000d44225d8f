"""`slipstream distill-draft`: it learns, what it saves drafts as it was scored, and it shares train-head's texts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.distill_draft import DraftRequest, distill_draft
from cluster.errors import ConfigError
from cluster.progress import Display
from cluster.sampled_texts import TextRequest, default_state_layers, state_layers_of
from tests import tiny_tokenizer
from tests.tiny_model import save_tiny_model
from worker.architecture import ModelConfig, read_config
from worker.draft_corpus import Lesson, shard_path
from worker.draft_distillation import Distillation, DraftTrainer
from worker.drafting import DraftSpec, build_drafter
from worker.fingerprint import make_batch
from worker.model import load_model

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=48, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32,
    max_position_embeddings=128,
)  # fmt: skip
TRAINING = Distillation(
    hidden_size=64, head_dim=32, intermediate_size=96, epochs=2, batch_tokens=128, autocast=False, learning_rate=5e-3
)


pytestmark = pytest.mark.usefixtures("one_thread")


def target_rows(config: ModelConfig) -> torch.Tensor:
    """Embeddings and output rows of a target."""
    return torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(1))


def lessons(config: ModelConfig = CONFIG, count: int = 40) -> list[Lesson]:
    """Texts of a target that wants token 5 t + 3 after t, mostly."""
    rows, made = target_rows(config), []
    for index in range(count):
        tokens = [index * 7 % config.vocab_size]
        while len(tokens) < 18:
            tokens.append((5 * tokens[-1] + 3) % config.vocab_size)
        token_ids = torch.tensor(tokens)
        made.append(
            Lesson(
                token_ids=token_ids,
                states=torch.empty(len(tokens), 0),
                hidden=rows[(5 * token_ids + 3) % config.vocab_size] * 0.3,
                num_prompt_tokens=2,
                is_held_out=index % 8 == 0,
            )
        )
    return made


def shared(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    return {name: target_rows(config) for name in ("embed_tokens.weight", "lm_head.weight")}


def request_in(directory: Path) -> DraftRequest:
    target = directory / "target"
    config = save_tiny_model(target)
    tiny_tokenizer.save(target)
    prompts = directory / "prompts.txt"
    prompts.write_text("".join(f"hello {index}\n" for index in range(40)))
    return DraftRequest(
        texts=TextRequest(
            directory=target, name="tiny", num_tokens=300, max_tokens=12, prompts=prompts, seed=0,
            state_layers=default_state_layers(config.num_layers),
        ),
        texts_of=None,
        output=directory / "draft",
        training=replace(TRAINING, epochs=1, batch_tokens=256),
        threads=1,
    )  # fmt: skip


def test_a_draft_model_learns_its_target(tmp_path: Path) -> None:
    trainer = DraftTrainer(CONFIG, shared(), lessons(), replace(TRAINING, epochs=16), tmp_path)
    before = trainer.score(3)
    trainer.run(lambda _: None)
    after = trainer.score(3)
    assert trainer.losses[-1][1] < trainer.losses[0][1]
    assert after.acceptance_length > before.acceptance_length + 0.3
    assert list(after.accepted) == sorted(after.accepted, reverse=True)


def test_a_few_drawn_tokens_stand_for_all_that_are_rare(tmp_path: Path) -> None:
    unsure = [replace(lesson, hidden=lesson.hidden * 0.1) for lesson in lessons()]
    whole = DraftTrainer(CONFIG, shared(), unsure, TRAINING, tmp_path)
    _, wanted = whole._loss(unsure[:4])
    few = DraftTrainer(CONFIG, shared(), unsure, replace(TRAINING, num_frequent=16, num_drawn=12), tmp_path)
    losses = []
    for few.step in range(20):
        losses.append(few._loss(unsure[:4])[1])
    assert len(set(losses)) > 1
    assert sum(losses) / len(losses) == pytest.approx(wanted, rel=0.02)


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    ends = []
    for stops in ((None,), (3, None)):
        directory = tmp_path / str(len(stops))
        directory.mkdir()
        for stop in stops:
            training = replace(TRAINING, num_frequent=16, num_drawn=12)
            trainer = DraftTrainer(CONFIG, shared(), lessons(), training, directory)
            trainer.run(lambda _: None, stop_after=stop)
        ends.append((trainer.losses, trainer.network.state_dict()))
    (losses, one), (others, other) = ends
    assert losses == others != []
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_saved_is_served_and_computes_what_was_trained(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    score = distill_draft(request, Display())
    assert len(score.accepted) == 4
    assert "Mean acceptance length" in (request.output / "README.md").read_text()
    options = {"dtype": torch.float32, "device": "cpu", "attention": "cpu", "num_blocks": 8, "block_size": 16}
    target = load_model(request.texts.directory, **options)  # type: ignore[arg-type]
    spec = DraftSpec(method="draft_model", directory=str(request.output), max_drafts=2, num_blocks=8)
    assert build_drafter(spec, target, request.texts.directory, max_num_seqs=2, sanitize=True) is not None
    config = target.config
    trained = DraftTrainer(config, shared(config), lessons(config), request.training, tmp_path)
    saved = load_model(request.output, **options)  # type: ignore[arg-type]
    state = torch.load(tmp_path / "draft.run" / "distillation.pt", weights_only=True)
    trained.network.load_state_dict(state["network"])
    token_ids = [5, 17, 99, 3, 42, 8]
    with torch.inference_mode():
        served = saved.logits(saved.forward(make_batch([(token_ids, 0, [0])], 16)))
        expected = trained.network.logits(trained.network(torch.tensor([token_ids]))[0])
    torch.testing.assert_close(served, expected, atol=0.05, rtol=0.05)  # saved in bfloat16


def test_the_texts_of_another_run_are_taken_and_those_of_another_target_refused(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    distill_draft(request, Display())
    shard = shard_path(tmp_path / "draft.run", 0)
    written = shard.stat().st_mtime_ns
    narrow = replace(request.training, hidden_size=32)
    other = replace(request, texts_of=tmp_path / "draft.run", output=tmp_path / "second", training=narrow)
    distill_draft(other, Display())
    assert read_config(other.output).hidden_size == 32
    assert shard.stat().st_mtime_ns == written
    assert not list((tmp_path / "second.run").glob("shard-*"))
    with pytest.raises(ConfigError, match="another run: its model is 'tiny', not 'else'"):
        distill_draft(replace(other, texts=replace(request.texts, name="else")), Display())


def test_a_target_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Mystery"]}')
    with pytest.raises(ConfigError, match=f"--model: {tmp_path}.*"):
        state_layers_of(tmp_path)
