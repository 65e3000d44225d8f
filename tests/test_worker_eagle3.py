"""EAGLE-3 heads: what they compute, where their KV is, and which checkpoints are refused."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.engine import Engine
from scheduler.events import CacheReset, PreemptRequested, SchedulerConfig
from scheduler.request import FinishReason, SamplingParams
from tests.heads import Sketch, Tensors, WrittenOut, save_head, tensors_of, true_states
from tests.oracle import undisturbed
from tests.worlds import with_pool
from worker.drafter import Drafter, VerifiedStep
from worker.eagle3 import Eagle3Drafter, Eagle3Head
from worker.eagle3_checkpoint import read_head
from worker.fingerprint import make_batch
from worker.model import Model, ModelConfig, random_model
from worker.rows import RowState
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

TARGET = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)
SOME_TOKENS = tuple(range(1, 96, 2))
PLAIN = Sketch(target=TARGET, state_layers=(0, 2, 1))
SKETCHES = {
    "speculators llama": PLAIN,
    "speculators qwen3, few tokens": Sketch(target=TARGET, flavour="qwen3", draft_token_ids=SOME_TOKENS),
    "speculators, all shared": Sketch(target=TARGET, own_embedding=False, own_head=False),
    "speculators, few tokens, shared": Sketch(
        target=TARGET, own_embedding=False, own_head=False, draft_token_ids=SOME_TOKENS
    ),
    "norm_before_residual, norm_output": Sketch(target=TARGET, flags=("norm_before_residual", "norm_output")),
    "norm_before_fc": Sketch(target=TARGET, flags=("norm_before_fc",)),
    "fc_norm, four states": Sketch(target=TARGET, flags=("fc_norm",), state_layers=(2, 0, 1, 1)),
    "raw bin": Sketch(
        target=TARGET, layout="raw", file="pytorch_model.bin", own_embedding=False, draft_token_ids=SOME_TOKENS
    ),
    "raw safetensors qwen3": Sketch(target=TARGET, layout="raw", flavour="qwen3"),
    "raw, wider than the target": Sketch(target=TARGET, layout="raw", hidden_size=96, num_heads=6),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def target() -> Model:
    return random_model(TARGET, seed=1, dtype=torch.float32, num_blocks=1, block_size=BLOCK)


def shared_of(model: Model) -> Tensors:
    return {"embed_tokens.weight": model.embedding, "lm_head.weight": model.embedding}


def head_of(sketch: Sketch, directory: Path, model: Model) -> Eagle3Head:
    return Eagle3Head(*read_head(save_head(sketch, directory), model.config, shared_of(model)), model)


def written_out(sketch: Sketch) -> WrittenOut:
    return WrittenOut(sketch, tensors_of(sketch), shared_of(target()))


class Watched(Drafter):
    """Compares every proposal with the head's drafts from scratch, but for rows of one step that part after a block."""

    def __init__(self, drafter: Eagle3Drafter, reference: WrittenOut, sketch: Sketch) -> None:
        self.max_drafts, self.state_layers = drafter.max_drafts, drafter.state_layers
        self._drafter, self._reference, self._layers = drafter, reference, sketch.state_layers
        self._alone = with_pool(target(), BLOCK, 16)
        self.num_compared = self.num_gaps = self.num_parted = 0

    def begin_session(self) -> None:
        self._drafter.begin_session()

    def forget(self, epoch: int) -> None:
        self._drafter.forget(epoch)

    def observe(self, step: VerifiedStep) -> None:
        self._drafter.observe(step)

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        proposed = self._drafter.propose(rows, num_propose)
        for row, drafts, wanted in zip(rows, proposed, num_propose, strict=True):
            first = self._drafter._waiting[row.epoch].first_block * BLOCK
            token_ids = row.token_ids.tolist()
            self.num_gaps += first > 0
            if first >= len(token_ids) - 1:
                assert drafts == []
                continue
            assert len(drafts) == min(wanted, self.max_drafts)
            if any(_part(row, other) for other, count in zip(rows, num_propose, strict=True) if count):
                self.num_parted += 1
                continue
            states = true_states(self._alone, token_ids[:-1], self._layers)[first:]
            token_ids = token_ids[first:]
            assert drafts == self._reference.drafts(states, token_ids, len(drafts)), row.request_id
            self.num_compared += len(drafts)
        return proposed


def _part(row: RowState, other: RowState) -> bool:
    """Whether they share a block and go on with different tokens after it."""
    shared = set(row.block_ids.tolist()) & set(other.block_ids.tolist())
    if not shared:
        return False
    end = BLOCK * len(shared)  # they are the first ones of both
    return end < min(row.num_tokens, other.num_tokens) and row.token_ids[end] != other.token_ids[end]


def engine_of(
    drafter: Callable[[Model], Drafter], *, num_blocks: int = 64, budget: int = 2048, num_drafts: int = 3
) -> tuple[Engine, Runner]:
    model = with_pool(target(), BLOCK, num_blocks)
    runner = Runner(
        worker_id="a",
        model=model,
        drafter=drafter(model),
        max_num_seqs=8,
        sanitizer=KVSanitizer(num_blocks, BLOCK),
    )
    config = SchedulerConfig(
        block_size=BLOCK, max_model_len=256, max_num_batched_tokens=budget, max_drafts=num_drafts, max_steps_in_flight=2
    )
    return Engine([runner], config), runner


def prompt_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TARGET.vocab_size, (length,), generator=generator).tolist()


# ---- what a head computes ----


@pytest.mark.parametrize("name", SKETCHES)
def test_every_layout_drafts_as_written_out(name: str, tmp_path: Path) -> None:
    sketch = SKETCHES[name]
    reference = written_out(sketch)
    watched: list[Watched] = []

    def drafter(model: Model) -> Watched:
        head = head_of(sketch, tmp_path, model)
        watched.append(Watched(Eagle3Drafter(head, max_drafts=3), reference, sketch))
        return watched[0]

    engine, _ = engine_of(drafter)
    for seed in range(2):
        engine.submit(prompt_of(seed, 9 + 20 * seed), GREEDY, 12)
    engine.run()
    assert watched[0].num_compared > 20


@pytest.mark.parametrize("name", SKETCHES)
def test_logits_are_those_written_out(name: str, tmp_path: Path) -> None:
    sketch = SKETCHES[name]
    model = with_pool(target(), BLOCK, 8)
    head, reference = head_of(sketch, tmp_path, model), written_out(sketch)
    token_ids = prompt_of(3, 40)
    states = true_states(model, token_ids[:-1], sketch.state_layers)
    first = head.forward(head.features(states[:30]), make_batch([(token_ids[1:31], 0, range(3))], BLOCK))
    second = head.forward(head.features(states[30:]), make_batch([(token_ids[31:], 30, range(3))], BLOCK))
    hidden = reference.hidden(reference.features(states), token_ids[1:])
    torch.testing.assert_close(torch.cat((first, second)), hidden, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(head.logits(second), reference.logits(hidden[30:]), atol=2e-4, rtol=1e-3)


# ---- its KV ----


def test_drafts_are_as_from_scratch_after_chunks_hits_preemptions_and_resets(tmp_path: Path) -> None:
    """Trap 29 and 30: KV of rejected and approximate pairs is rewritten, and a prefix hit lacks none."""
    watched: list[Watched] = []

    def drafter(model: Model) -> Watched:
        watched.append(Watched(Eagle3Drafter(head_of(PLAIN, tmp_path, model), max_drafts=3), written_out(PLAIN), PLAIN))
        return watched[0]

    engine, runner = engine_of(drafter, num_blocks=20, budget=24)
    assert not runner.drop_last_hit_block
    shared = prompt_of(7, 48)
    for index in range(10):
        prompt = shared[: (48, 32, 33)[index % 3]] + prompt_of(index, index % 4)
        engine.submit(prompt, GREEDY, 24, f"r{index}", max_drafts=index % 4)
        for _ in range(7):
            engine.step()
        if index == 5:
            engine.handle(PreemptRequested(request_id="r5"))
        if index == 8:
            engine.handle(CacheReset(reset_running=True))
    outputs = engine.run()
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions
    assert watched[0].num_compared > 100
    assert watched[0].num_parted > 0
    alone = with_pool(target(), BLOCK, 16)
    for output in outputs.values():
        assert output.finish_reason is FinishReason.LENGTH, output.finish
        assert output.token_ids == undisturbed(alone, output.prompt_token_ids.tolist(), GREEDY, 24).token_ids


def test_where_no_states_were_kept_a_row_drafts_from_what_follows(tmp_path: Path) -> None:
    """Also one that hits such blocks; what an earlier owner left in them is read by nobody."""
    watched: list[Watched] = []

    def drafter(model: Model) -> Watched:
        head = head_of(PLAIN, tmp_path, model)
        head.kv_cache.key.fill_(7.0)
        head.kv_cache.value.fill_(7.0)
        watched.append(Watched(Eagle3Drafter(head, max_drafts=3), written_out(PLAIN), PLAIN))
        return watched[0]

    engine, _ = engine_of(drafter, num_blocks=24, budget=24)
    shared = [prompt_of(seed, 64) for seed in range(3)]
    for index in range(30):
        prompt = shared[index // 3 % 3][: (64, 32, 49)[index % 3]] + prompt_of(index, index % 4)
        engine.submit(prompt, GREEDY, 12, f"r{index}", max_drafts=index % 4)
        for step in range(9):
            watched[0].state_layers = () if (index + step) % 7 < index // 9 % 4 else PLAIN.state_layers
            engine.step()
    outputs = engine.run()
    assert engine.scheduler.stats().prefix_cache_hits > 0
    assert watched[0].num_gaps > 50
    assert watched[0].num_compared > 150
    alone = with_pool(target(), BLOCK, 16)
    for output in outputs.values():
        assert output.token_ids == undisturbed(alone, output.prompt_token_ids.tolist(), GREEDY, 12).token_ids


def test_a_block_that_its_owner_left_without_pairs_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    watched: list[Watched] = []

    def drafter(model: Model) -> Watched:
        watched.append(Watched(Eagle3Drafter(head_of(PLAIN, tmp_path, model), max_drafts=3), written_out(PLAIN), PLAIN))
        return watched[0]

    engine, _ = engine_of(drafter, num_blocks=6)
    first, second = prompt_of(1, 64), prompt_of(2, 64)
    engine.submit(first, GREEDY, 2)
    engine.run()
    engine.handle(CacheReset(reset_running=False))
    watched[0].state_layers = ()
    engine.submit(second, GREEDY, 2)
    engine.run()
    assert watched[0].num_gaps == 0
    watched[0].state_layers = PLAIN.state_layers
    engine.submit([*second, 5], GREEDY, 24)
    engine.run()
    assert engine.scheduler.stats().prefix_cache_hits >= 48
    assert watched[0].num_gaps > 3


class Kept(Eagle3Drafter):
    """Remembers each request's blocks."""

    blocks: dict[str, list[int]]

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        for row in rows:
            self.blocks[row.request_id] = row.block_ids.tolist()
        return super().propose(rows, num_propose)

    def last_pair(self, request_id: str, index: int) -> torch.Tensor:
        """The key of the last pair of one of its blocks."""
        return self._head.kv_cache.key[0, self.blocks[request_id][index], -1].clone()


def engine_that_keeps(directory: Path) -> tuple[Engine, Kept]:
    kept: list[Kept] = []

    def drafter(model: Model) -> Kept:
        kept.append(Kept(head_of(PLAIN, directory, model), max_drafts=3))
        kept[0].blocks = {}
        return kept[0]

    engine, _ = engine_of(drafter)
    return engine, kept[0]


def pair_of_one_alone(directory: Path, prompt: list[int]) -> torch.Tensor:
    engine, kept = engine_that_keeps(directory)
    engine.submit(prompt, GREEDY, 8, "alone")
    engine.run()
    return kept.last_pair("alone", 2)


def test_trap_27_the_last_pair_of_a_hit_is_made_anew_for_a_row_that_goes_on_with_another_token(tmp_path: Path) -> None:
    """So the last block of a hit need not be dropped."""
    engine, kept = engine_that_keeps(tmp_path)
    pairs = []
    for index, next_token in enumerate((5, 6, 5)):
        engine.submit([*prompt_of(7, 48), next_token], GREEDY, 8, f"r{index}")
        engine.run()
        pairs.append(kept.last_pair(f"r{index}", 2))
        alone = pair_of_one_alone(tmp_path, [*prompt_of(7, 48), next_token])
        torch.testing.assert_close(pairs[-1], alone, atol=1e-5, rtol=1e-4)
    assert engine.scheduler.stats().prefix_cache_hits == 2 * 48
    assert not torch.allclose(pairs[0], pairs[1], atol=1e-2)


def test_a_row_makes_a_pair_anew_when_one_that_parted_from_it_there_has_gone(tmp_path: Path) -> None:
    engine, kept = engine_that_keeps(tmp_path)
    engine.submit([*prompt_of(7, 48), 5], GREEDY, 60, "a")
    while not engine.outputs["a"].token_ids:
        engine.step()
    own = kept.last_pair("a", 2)
    engine.submit([*prompt_of(7, 48), 6], GREEDY, 4, "b")
    others = []
    while engine.outputs["b"].finish is None:
        engine.step()
        others.append(not torch.allclose(kept.last_pair("a", 2), own, atol=1e-2))
    assert any(others)
    engine.run()
    torch.testing.assert_close(kept.last_pair("a", 2), own)


def test_no_block_is_allocated_for_a_head(tmp_path: Path) -> None:
    def most_blocks(drafter: Callable[[Model], Drafter]) -> list[int]:
        engine, _ = engine_of(drafter)
        engine.submit(prompt_of(1, 60), GREEDY, 30)
        used = []
        while any(output.finish is None for output in engine.outputs.values()):
            engine.step()
            [worker] = engine.scheduler.stats().workers
            used.append(worker.num_blocks - worker.num_free_blocks)
        return used

    class Silent(Drafter):
        """Proposes as much as a head that is never right would: the wrong token."""

        max_drafts = 3

        def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
            return [[] for _ in rows]

    with_head = most_blocks(lambda model: Eagle3Drafter(head_of(PLAIN, tmp_path, model), max_drafts=3))
    assert max(with_head) == max(most_blocks(lambda model: Silent()))


def test_a_head_that_goes_wrong_poisons_nobody(tmp_path: Path) -> None:
    tensors = tensors_of(PLAIN)
    tensors["fc.weight"][:] = torch.inf
    directory = save_head(PLAIN, tmp_path, tensors)

    def drafter(model: Model) -> Drafter:
        return Eagle3Drafter(Eagle3Head(*read_head(directory, TARGET, shared_of(model)), model), max_drafts=3)

    engine, _ = engine_of(drafter)
    prompt = prompt_of(1, 20)
    engine.submit(prompt, GREEDY, 8)
    [output] = engine.run().values()
    assert output.token_ids == undisturbed(with_pool(target(), BLOCK, 16), prompt, GREEDY, 8).token_ids
    assert engine.scheduler.stats().num_draft_tokens == 0


# ---- noise ----


def test_drafts_are_sampled_with_the_noise_that_verifies_them(tmp_path: Path) -> None:
    """A head whose logits are the target's own would be right at any temperature: here both are flat."""
    tensors = tensors_of(PLAIN)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1e-4
    flat = random_model(TARGET, seed=1, dtype=torch.float32, num_blocks=64, block_size=BLOCK)
    flat.logits = lambda hidden: torch.zeros(len(hidden), TARGET.vocab_size)  # type: ignore[method-assign]
    head = Eagle3Head(*read_head(save_head(PLAIN, tmp_path, tensors), TARGET, shared_of(flat)), flat)
    runner = Runner(
        worker_id="a",
        model=flat,
        drafter=Eagle3Drafter(head, max_drafts=3),
        max_num_seqs=2,
        sanitizer=None,
    )
    engine = Engine([runner], SchedulerConfig(block_size=BLOCK, max_model_len=256, max_drafts=3))
    engine.submit(prompt_of(1, 20), SamplingParams(temperature=1.0, seed=5), 80)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens > 0


# ---- what is refused ----


def spoiled(change: Callable[[Tensors, dict[str, Any]], None], directory: Path, sketch: Sketch = PLAIN) -> Path:
    save_head(sketch, directory)
    path = directory / "config.json"
    settings, tensors = json.loads(path.read_text()), tensors_of(sketch)
    change(tensors, settings)
    path.write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


FAULTS: dict[str, Callable[[Tensors, dict[str, Any]], Any]] = {
    "tensor fc.weight is missing": lambda t, s: t.pop("fc.weight"),
    "tensor layers.0.mlp.up_proj.weight is missing": lambda t, s: t.pop("layers.0.mlp.up_proj.weight"),
    "tensor extra.weight is unknown": lambda t, s: t.update({"extra.weight": torch.zeros(2)}),
    r"tensor layers.0.self_attn.q_proj.weight has shape \[128, 64\], not \[128, 128\]": lambda t, s: t.update(
        {"layers.0.self_attn.q_proj.weight": torch.zeros(128, 64)}
    ),
    "not an EAGLE-3 head": lambda t, s: t.pop("layers.0.hidden_norm.weight"),
    "a head for another target: fc.weight reads 200 features": lambda t, s: t.update(
        {"fc.weight": torch.zeros(64, 200)}
    ),
    "a head for another target: its vocab_size is 5": lambda t, s: s["transformer_layer_config"].update(vocab_size=5),
    "a head for another target: it reads layer 7 of 3": lambda t, s: s.update(
        eagle_aux_hidden_state_layer_ids=[0, 1, 7]
    ),
    r"fc.weight reads 3 hidden states, eagle_aux_hidden_state_layer_ids are \[0\]": lambda t, s: s.update(
        eagle_aux_hidden_state_layer_ids=[0]
    ),
    "speculators_model_type 'mtp' is not supported": lambda t, s: s.update(speculators_model_type="mtp"),
    "tensor d2t is missing: lm_head.weight has 48 rows": lambda t, s: t.update({"lm_head.weight": torch.zeros(48, 64)}),
    "d2t leads outside": lambda t, s: t.update({"d2t": torch.full((96,), 50), "t2d": torch.ones(96, dtype=torch.bool)}),
    "d2t and t2d contradict": lambda t, s: t.update(
        {"d2t": torch.zeros(48, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}
    ),
    "exclude each other": lambda t, s: s.update(norm_before_fc=True, fc_norm=True),
    "num_hidden_layers is 2": lambda t, s: s["transformer_layer_config"].update(num_hidden_layers=2),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_wrong_with_a_checkpoint_is_named(message: str, tmp_path: Path) -> None:
    directory = spoiled(FAULTS[message], tmp_path)
    with pytest.raises(ValueError, match=message):
        read_head(directory, TARGET, shared_of(target()))


def test_a_bin_file_may_hold_nothing_but_tensors(tmp_path: Path) -> None:
    sketch = SKETCHES["raw bin"]
    save_head(sketch, tmp_path)
    torch.save({"fc.weight": Path("/tmp")}, tmp_path / sketch.file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds more than tensors"):
        read_head(tmp_path, TARGET, shared_of(target()))


def test_shared_rows_of_another_width_are_missing_ones(tmp_path: Path) -> None:
    sketch = Sketch(target=TARGET, hidden_size=96, num_heads=6, own_embedding=False)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is missing"):
        read_head(save_head(sketch, tmp_path), TARGET, shared_of(target()))
