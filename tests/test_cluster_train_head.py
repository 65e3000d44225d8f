"""`slipstream train-head` from prompts to a head that serves, on a tiny model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.head_prompts import read_prompts, varied_prompts
from cluster.progress import Display
from cluster.sampled_texts import TextRequest, default_state_layers
from cluster.train_head import HeadRequest, train_head
from tests import tiny_tokenizer
from tests.tiny_model import save_tiny_model
from worker.draft_training import Training
from worker.eagle3 import Eagle3Drafter, load_head
from worker.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def request_in(directory: Path) -> HeadRequest:
    target = directory / "target"
    config = save_tiny_model(target)
    tiny_tokenizer.save(target)
    prompts = directory / "prompts.txt"
    prompts.write_text("".join(f"hello {index}\n" for index in range(80)))
    layers = default_state_layers(config.num_layers)
    return HeadRequest(
        texts=TextRequest(
            directory=target, name="tiny", num_tokens=600, max_tokens=12, prompts=prompts, state_layers=layers, seed=0
        ),
        output=directory / "head",
        training=Training(state_layers=layers, draft_vocab_size=200, epochs=1, batch_tokens=256),
        threads=1,
    )


def test_a_head_is_trained_measured_and_loads(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    score = train_head(request, Display())
    assert len(score.accepted) == 4
    assert "Mean acceptance length" in (request.output / "README.md").read_text()
    model = load_model(
        request.texts.directory, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=8, block_size=16
    )
    head = load_head(request.output, model, request.texts.directory)
    assert head.config.state_layers == (0, 1)
    assert head.config.token_ids is not None
    assert len(head.config.token_ids) == 200
    Eagle3Drafter(head, max_drafts=3)


def test_a_finished_run_is_not_run_again_and_another_one_is_refused(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    first = train_head(request, Display())
    shard = request.output.with_name("head.run") / "shard-00000.safetensors"
    written = shard.stat().st_mtime_ns
    assert train_head(request, Display()).accepted == first.accepted
    assert shard.stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="another run"):
        train_head(replace(request, texts=replace(request.texts, max_tokens=13)), Display())


def test_our_own_prompts_are_many_and_different() -> None:
    prompts = varied_prompts(0)
    assert len(set(prompts)) == len(prompts) > 3000
    assert varied_prompts(0) == prompts != varied_prompts(1)


def test_a_prompt_may_be_a_json_string(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('one\n\n"two\\nlines"\none\n')
    assert read_prompts(path) == ["one", "two\nlines"]
    path.write_text('"open\n')
    with pytest.raises(ValueError, match="line 1"):
        read_prompts(path)


@pytest.mark.parametrize(("num_layers", "layers"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (2, (0, 1)), (1, (0,))])
def test_the_usual_layers_are_read(num_layers: int, layers: tuple[int, ...]) -> None:
    assert default_state_layers(num_layers) == layers
