"""Decoders that run through transformers' code are drafted for, and draft, like those of the lean family."""

from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from cluster.config import ServeConfig, SpeculativeConfig
from cluster.distill_draft import DraftRequest, distill_draft
from cluster.engine import Engine
from cluster.progress import Display
from cluster.sampled_texts import TextRequest, run_directory
from cluster.sizing import size
from cluster.train_head import HeadRequest, train_head
from scheduler.request import SamplingParams
from tests import tiny_tokenizer
from tests.test_worker_hf_model import CONFIGS, NUM_TOKENS, generated, made
from worker.actor import build
from worker.draft_distillation import Distillation
from worker.draft_training import Training
from worker.hf_model import HfModel

PROMPT = list(range(3, 40))


pytestmark = pytest.mark.usefixtures("one_thread")


def saved(config: PreTrainedConfig, directory: Path) -> Path:
    """A random model of the tiny tokenizer's vocabulary, with the tokenizer."""
    config.vocab_size = 320
    made(config).save_pretrained(directory)
    tiny_tokenizer.save(directory)
    return directory


@pytest.mark.parametrize("name", ["gpt_neox", "phi3"])
def test_a_head_and_a_draft_model_are_trained_for_it_and_serve_its_streams(name: str, tmp_path: Path) -> None:
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict())
    target = saved(config, tmp_path / "target")
    (tmp_path / "prompts").write_text("".join(f"hello {index}\n" for index in range(40)))
    texts = TextRequest(
        directory=target, name="tiny", num_tokens=300, max_tokens=12, prompts=tmp_path / "prompts",
        state_layers=(0, 1, 2), seed=0,
    )  # fmt: skip
    head, draft = tmp_path / "head", tmp_path / "draft"
    training = Training(state_layers=(0, 1, 2), draft_vocab_size=100, epochs=1, batch_tokens=256)
    train_head(HeadRequest(texts=texts, output=head, training=training, threads=1), Display())
    shape = Distillation(hidden_size=32, head_dim=32, intermediate_size=32, epochs=1, batch_tokens=256)
    distill_draft(
        DraftRequest(texts=texts, texts_of=run_directory(head), output=draft, training=shape, threads=1), Display()
    )
    expected = generated(made(config), PROMPT)
    accepted = {}
    for method, directory in (("eagle3", head), ("draft_model", draft), ("draft_model", target)):
        speculative = SpeculativeConfig(method=method, model=str(directory), num_speculative_tokens=3)
        sizes = size(ServeConfig(model=str(target), speculative=speculative, device="cpu", threads=1), target)
        runner, _ = build(sizes.workers[0])
        assert isinstance(runner.model, HfModel)
        engine = Engine([runner], sizes.scheduler)
        engine.submit(PROMPT, SamplingParams(temperature=0.0), NUM_TOKENS)
        [output] = engine.run().values()
        assert output.token_ids == expected
        accepted[directory] = engine.scheduler.stats().num_accepted_tokens
    assert accepted[target] > NUM_TOKENS // 2
