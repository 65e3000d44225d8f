"""From a DraftSpec to a drafter, and from flags to a DraftSpec."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster import sizing
from cluster.config import ServeConfig, SpeculativeConfig
from cluster.engine import Engine
from cluster.errors import ConfigError
from cluster.sizing import size
from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from tests import tiny_tokenizer
from tests.heads import Sketch, save_head
from tests.oracle import undisturbed
from tests.tiny_model import MAX_LEN, save_tiny_model
from worker.actor import build
from worker.architecture import read_config
from worker.draft_model import DraftModelDrafter
from worker.drafter import NgramDrafter
from worker.drafting import DraftSpec, build_drafter, check_same_tokenizer, load_draft_weights, model_drafter
from worker.eagle3 import Eagle3Drafter
from worker.mixture import MixedDrafter
from worker.model import load_model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

pytestmark = pytest.mark.usefixtures("one_thread")


def target_in(directory: Path) -> Path:
    save_tiny_model(directory / "target")
    return directory / "target"


def head_in(directory: Path, target: Path) -> Path:
    return save_head(Sketch(target=read_config(target), own_embedding=False, own_head=False), directory / "head")


def served(speculative: SpeculativeConfig, target: Path) -> ServeConfig:
    return ServeConfig(
        model=str(target), speculative=speculative, device="cpu", max_num_seqs=4, threads=1, num_gpu_blocks_override=64
    )


def test_every_method_serves_the_same_streams(tmp_path: Path) -> None:
    target = target_in(tmp_path)
    save_tiny_model(tmp_path / "small", seed=5)
    methods = {
        "ngram": SpeculativeConfig(num_speculative_tokens=3),
        "auto": SpeculativeConfig(),
        "eagle3": SpeculativeConfig(method="eagle3", model=str(head_in(tmp_path, target)), num_speculative_tokens=3),
        "eagle3 auto": SpeculativeConfig(method="eagle3", model=str(tmp_path / "head")),
        "draft_model": SpeculativeConfig(
            method="draft_model", model=str(tmp_path / "small"), draft_kv_retention="step", draft_window=16
        ),
        "itself": SpeculativeConfig(method="draft_model", model=str(target), num_speculative_tokens=3),
    }
    alone = load_model(target, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=16, block_size=16)
    expected = undisturbed(alone, [5, 9, 2, 77, 1], SamplingParams(temperature=0.0), 40).token_ids
    accepted = {}
    for name, speculative in methods.items():
        sizes = size(served(speculative, target), target)
        runner, traits = build(sizes.workers[0])
        assert traits.max_drafts == speculative.max_drafts
        assert not traits.drop_last_hit_block
        engine = Engine([runner], sizes.scheduler)
        engine.submit([5, 9, 2, 77, 1], SamplingParams(temperature=0.0), 40)
        [output] = engine.run().values()
        assert output.token_ids == expected, name
        accepted[name] = engine.scheduler.stats().num_accepted_tokens
    assert accepted["itself"] > 20


def test_a_spec_gives_its_drafter(tmp_path: Path) -> None:
    target = target_in(tmp_path)
    model = load_model(target, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=16, block_size=16)

    def built(spec: DraftSpec) -> object:
        return build_drafter(spec, model, target, max_num_seqs=4, sanitize=True)

    assert built(DraftSpec(max_drafts=0)) is None
    assert isinstance(built(DraftSpec()), NgramDrafter)
    assert isinstance(built(DraftSpec(is_adaptive=True)), MixedDrafter)
    with_head = built(DraftSpec(method="eagle3", directory=str(head_in(tmp_path, target))))
    assert isinstance(with_head, MixedDrafter)
    assert isinstance(with_head._model, Eagle3Drafter)
    with_model = built(DraftSpec(method="draft_model", directory=str(target), num_blocks=8))
    assert isinstance(with_model, MixedDrafter)
    assert isinstance(with_model._model, DraftModelDrafter)
    with pytest.raises(ValueError, match="there is no directory"):
        built(DraftSpec(method="eagle3", directory=str(tmp_path / "nowhere")))


def test_a_draft_model_drafts_up_to_its_own_context_and_the_output_goes_on(tmp_path: Path) -> None:
    target, small = target_in(tmp_path), tmp_path / "small"
    save_tiny_model(small)  # the target itself, but for its context: always right
    settings = json.loads((small / "config.json").read_text()) | {"max_position_embeddings": 40}
    (small / "config.json").write_text(json.dumps(settings))
    model = load_model(target, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=16, block_size=16)
    spec = DraftSpec(method="draft_model", directory=str(small), num_blocks=8, max_drafts=3)
    weights = load_draft_weights(spec, model, target)
    assert weights is not None
    drafter = model_drafter(spec, model, weights, max_num_seqs=1, sanitize=True)
    runner = Runner(worker_id="a", model=model, drafter=drafter, max_num_seqs=1, sanitizer=KVSanitizer(16, 16))
    engine = Engine([runner], SchedulerConfig(block_size=16, max_model_len=MAX_LEN, max_drafts=3))
    engine.submit([5, 9, 2, 77, 1], SamplingParams(temperature=0.0), 100)
    [output] = engine.run().values()
    assert len(output.token_ids) == 100
    stats = engine.scheduler.stats()
    assert 20 < stats.num_accepted_tokens == stats.num_draft_tokens <= 40 - 5


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two", "bare"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        tiny_tokenizer.save(tmp_path / name)
    check_same_tokenizer(tmp_path / "one", tmp_path / "two")
    check_same_tokenizer(tmp_path / "bare", tmp_path / "two")
    path = tmp_path / "one" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="another tokenizer"):
        check_same_tokenizer(tmp_path / "one", tmp_path / "two")


# ---- from flags ----


def test_auto_is_the_default_and_a_shipped_head_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in(tmp_path)
    monkeypatch.setattr(sizing, "SHIPPED_HEADS", tmp_path / "none")
    sizes = size(ServeConfig(device="cpu", max_model_len=MAX_LEN), target)
    assert sizes.workers[0].drafts == DraftSpec(max_drafts=8, is_adaptive=True)
    assert sizes.scheduler.max_drafts == 8
    head_in(tmp_path, target).rename(tmp_path / "smollm2")
    monkeypatch.setattr(sizing, "SHIPPED_HEADS", tmp_path)
    plain = sizes.workers[0]
    spec = size(ServeConfig(device="cpu", max_model_len=MAX_LEN), target).workers[0]
    assert (spec.drafts.method, spec.drafts.directory) == ("eagle3", str(tmp_path / "smollm2"))
    assert spec.bytes_per_block == plain.bytes_per_block + 2 * 2 * 32 * 16 * 4
    assert spec.weight_bytes > plain.weight_bytes
    chosen = ServeConfig(device="cpu", max_model_len=MAX_LEN, speculative=SpeculativeConfig(method="ngram"))
    assert size(chosen, target).workers[0].drafts.method == "ngram"
    none = ServeConfig(device="cpu", max_model_len=MAX_LEN, speculative=SpeculativeConfig(num_speculative_tokens=0))
    assert size(none, target).workers[0].bytes_per_block == plain.bytes_per_block  # no room for what drafts nothing


def test_a_draft_model_s_pool_holds_every_row_or_what_is_asked_for(tmp_path: Path) -> None:
    target = target_in(tmp_path)
    speculative = SpeculativeConfig(method="draft_model", model=str(target), num_speculative_tokens=4)

    def blocks(speculative: SpeculativeConfig) -> int:
        return size(served(speculative, target), target).workers[0].drafts.num_blocks

    assert blocks(speculative) == 4 * MAX_LEN // 16
    assert blocks(replace(speculative, draft_kv_retention="step", draft_window=28)) == 4 * 2
    assert blocks(replace(speculative, num_draft_blocks=7)) == 7


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "medusa"}, "method must be one of ngram, eagle3, draft_model"),
        ({"method": "eagle3"}, "method eagle3 needs model"),
        ({"model": "x"}, "needs method"),
        ({"method": "eagle3", "model": 3}, "model must be a directory"),
        ({"num_speculative_tokens": "many"}, "must be an integer or 'auto'"),
        ({"num_speculative_tokens": True}, "must be an integer or 'auto'"),
        ({"num_speculative_tokens": 65}, r"must be in \[0, 64\]"),
        ({"draft_kv_retention": "ever"}, "draft_kv_retention must be one of request, step"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1"),
        ({"draft_window": 0}, "draft_window must be at least 1"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_json(json.dumps(keys))


def test_a_model_that_is_no_directory_is_named(tmp_path: Path) -> None:
    target = target_in(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        size(served(SpeculativeConfig(method="eagle3", model="nowhere"), target), target)
