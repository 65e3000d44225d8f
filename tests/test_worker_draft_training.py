"""Training a head: what it learns is what it will do, it goes on where it stopped, and it learns."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scheduler.request import SamplingParams
from tests.heads import Sketch, WrittenOut
from tests.oracle import undisturbed
from worker.draft_corpus import Lesson, Text, read_lessons, shard_path, write_shard
from worker.draft_training import HeadNetwork, HeadTrainer, Training
from worker.eagle3_checkpoint import read_head
from worker.model import Model, ModelConfig
from worker.weights import random_weights

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
LAYERS = (0, 1, 2)
TRAINING = Training(state_layers=LAYERS, draft_vocab_size=48, epochs=3, batch_tokens=128, autocast=False)


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """Of a target whose next token is decided by the last one, mostly: what a head can learn in seconds."""
    made = random_weights(CONFIG, seed=2)
    for name in made:
        if "o_proj" in name or "down_proj" in name:
            made[name] = made[name] * 0.05
    made["model.embed_tokens.weight"] = made["model.embed_tokens.weight"] * 10
    return made


@functools.cache
def model() -> Model:
    return Model(CONFIG, weights(), dtype=torch.float32, device="cpu", attention="cpu", num_blocks=8, block_size=16)


def shared() -> dict[str, torch.Tensor]:
    return {
        "embed_tokens.weight": weights()["model.embed_tokens.weight"],
        "lm_head.weight": weights()["lm_head.weight"],
        "norm.weight": weights()["model.norm.weight"],
    }


def texts(count: int) -> list[Text]:
    """The target's own, held-out ones greedy."""
    made = []
    for index in range(count):
        prompt = [index * 7 % 64, index * 11 % 64, index * 13 % 64]
        temperature = 0.0 if index % 8 == 0 else 0.7
        stream = undisturbed(model(), prompt, SamplingParams(temperature=temperature, seed=index), 14 + index % 11)
        made.append(Text(token_ids=prompt + stream.token_ids, num_prompt_tokens=3, is_held_out=index % 8 == 0))
    return made


@functools.cache
def lessons() -> tuple[Lesson, ...]:
    with tempfile.TemporaryDirectory() as directory:
        written = texts(80)
        for shard in range(2):
            write_shard(shard_path(Path(directory), shard), written[shard * 40 :][:40], model(), LAYERS)
        return tuple(read_lessons(Path(directory)))


def test_a_shard_gives_back_what_was_written(tmp_path: Path) -> None:
    written = texts(5)
    write_shard(shard_path(tmp_path, 3), written, model(), LAYERS)
    read = read_lessons(tmp_path)
    assert [lesson.token_ids.tolist() for lesson in read] == [text.token_ids for text in written]
    assert [lesson.is_held_out for lesson in read] == [text.is_held_out for text in written]
    assert read[1].states.shape == (len(read[1]), 3 * CONFIG.hidden_size)


def test_each_depth_computes_what_drafting_so_deep_computes() -> None:
    """Teacher-forced, written out: true states up to where the draft begins, its own outputs from there."""
    torch.manual_seed(0)
    network = HeadNetwork(CONFIG, 3, torch.rand(3 * CONFIG.hidden_size) + 0.5)
    token_ids = torch.arange(20) * 5 % 60
    states = torch.randn(19, 3 * CONFIG.hidden_size)
    with torch.no_grad():
        outputs = network.depths(states[None], shared()["embed_tokens.weight"][token_ids[1:]][None], 4)
    reference = WrittenOut(Sketch(target=CONFIG, state_layers=LAYERS, own_embedding=False), network.tensors(), shared())
    known = reference.features(states)
    for begin in (0, 1, 7, 15):
        features = known[: begin + 1]
        for depth in range(4):
            hidden = reference.hidden(features, token_ids[1 : len(features) + 1].tolist())
            torch.testing.assert_close(outputs[depth][0, begin + depth], hidden[-1], atol=1e-4, rtol=1e-3)
            features = torch.cat((features, hidden[-1:]))


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    ends = []
    for stops in ((None,), (5, 9, None)):
        directory = tmp_path / str(len(stops))
        directory.mkdir()
        for stop in stops:
            trainer = HeadTrainer(CONFIG, shared(), lessons(), TRAINING, directory)
            trainer.run(lambda _: None, stop_after=stop)
            assert trainer.step == (stop or trainer.num_steps)
        ends.append((trainer.losses, trainer.network.state_dict()))
    (losses, one), (others, other) = ends
    assert losses == others != []
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_of_other_settings_is_not_taken_up(tmp_path: Path) -> None:
    HeadTrainer(CONFIG, shared(), lessons(), TRAINING, tmp_path).run(lambda _: None, stop_after=1)
    with pytest.raises(ValueError, match="other settings"):
        HeadTrainer(CONFIG, shared(), lessons(), replace(TRAINING, depth=4), tmp_path)


def test_a_head_learns_and_what_is_saved_drafts_as_it_was_scored(tmp_path: Path) -> None:
    trainer = HeadTrainer(CONFIG, shared(), lessons(), replace(TRAINING, epochs=16), tmp_path)
    before = trainer.score(3)
    trainer.run(lambda _: None)
    after = trainer.score(3)
    assert after.acceptance_length > before.acceptance_length + 0.5
    assert list(after.accepted) == sorted(after.accepted, reverse=True)
    trainer.export(tmp_path / "head", target_name="tiny", architecture="LlamaForCausalLM", num_drafts=3)
    config, tensors = read_head(tmp_path / "head", CONFIG, shared())
    assert config.token_ids is not None
    sketch = Sketch(target=CONFIG, state_layers=LAYERS, draft_token_ids=tuple(config.token_ids.tolist()))
    reference = WrittenOut(sketch, {name: tensor.float() for name, tensor in tensors.items()}, shared())
    right = total = 0
    for lesson in (lesson for lesson in lessons() if lesson.is_held_out):
        token_ids = lesson.token_ids.tolist()
        for length in range(5, len(token_ids) - 3):
            drafts = reference.drafts(lesson.states[: length - 1], token_ids[:length], 3)
            right += next((d for d in range(3) if drafts[d] != token_ids[length + d]), 3)
            total += 1
    assert right / total == pytest.approx(after.acceptance_length - 1, abs=0.1)
