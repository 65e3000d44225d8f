"""Weights are swapped under running streams: each goes on from its confirmed tokens with the new ones."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster.engine import Engine
from scheduler.events import SchedulerConfig, SwapRequested
from scheduler.request import SamplingParams
from tests.oracle import undisturbed
from tests.tiny_model import CONFIG, save_tiny_model
from worker.checkpoints import Checkpoints
from worker.drafter import NgramDrafter
from worker.model import Model, load_model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 32, 16, 40
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([5, 6, 7, 5, 6, 7, 5], list(range(20, 60)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp(f"tiny{seed}") for seed in range(2)]
    for seed, directory in enumerate(found):
        save_tiny_model(directory, seed=seed)
    return found


def load(directory: Path) -> Model:
    return load_model(
        directory, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )


def continuation(model: Model, token_ids: Sequence[int], count: int) -> list[int]:
    return undisturbed(model, token_ids, GREEDY, count).token_ids


@pytest.mark.parametrize("is_prepared", [True, False])
def test_streams_go_on_from_their_confirmed_tokens_with_the_new_weights(
    directories: list[Path], is_prepared: bool
) -> None:
    checkpoints, model = Checkpoints(), load(directories[0])
    checkpoints.begin(model)
    runner = Runner(
        worker_id="w",
        model=model,
        drafter=NgramDrafter(max_drafts=4, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=256),
        max_num_seqs=4,
        sanitizer=KVSanitizer(NUM_BLOCKS, BLOCK_SIZE),
        swap=checkpoints.swap,
    )
    engine = Engine([runner], SchedulerConfig(max_model_len=256))
    names = [engine.submit(prompt, GREEDY, MAX_TOKENS) for prompt in PROMPTS]
    while min(len(engine.outputs[name].token_ids) for name in names) < 8:
        engine.step()
    before = {name: list(engine.outputs[name].token_ids) for name in names}
    weights = f"1 {directories[1]}"
    if is_prepared:
        checkpoints.prepare(weights)
        assert checkpoints.current is None
    engine.handle(SwapRequested(weights=weights))
    outputs = engine.run()
    assert checkpoints.current == weights
    old, new = load(directories[0]), load(directories[1])
    for name, prompt in zip(names, PROMPTS, strict=True):
        got = outputs[name].token_ids
        borders = [
            border
            for border in range(len(before[name]), MAX_TOKENS)
            if got[:border] == continuation(old, prompt, border)
            and got[border:] == continuation(new, [*prompt, *got[:border]], MAX_TOKENS - border)
        ]
        assert borders
        assert got != continuation(old, prompt, MAX_TOKENS)
    engine.scheduler.check()


def test_the_same_weights_again_keep_the_model_and_its_pool(directories: list[Path]) -> None:
    checkpoints, first = Checkpoints(), load(directories[0])
    checkpoints.begin(first)
    second = checkpoints.swap(f"1 {directories[1]}")
    assert second is not first
    assert second.kv_cache is first.kv_cache
    assert second.weights_hash != first.weights_hash
    assert checkpoints.swap(f"1 {directories[1]}") is second
    assert checkpoints.swap(f"2 {directories[1]}") is not second  # its files may be others by now


def test_what_cannot_be_swapped_to_is_refused(directories: list[Path], tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.begin(load(directories[0]))
    with pytest.raises(ValueError, match="there is no directory"):
        checkpoints.prepare(f"1 {tmp_path}/nowhere")
    save_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="of another architecture"):
        checkpoints.prepare(f"1 {tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="damaged"):
        checkpoints.prepare(f"1 {tmp_path}")
    assert checkpoints.current is None
