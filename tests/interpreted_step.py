"""Whole steps on device rows, under Triton's interpreter. Run by test_worker_kernels.py in a process of its own."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from scheduler.request import SamplingParams
from tests.bench.device_streams import DeviceStreams, TinyRequest, host_stream, tiny_config, tiny_requests
from worker.batch import Batch
from worker.kernels.drafting import append_drafts, gather_drafts, gather_drafts_reference, propose_drafts
from worker.kernels.rows import DeviceRows
from worker.kernels.step import DeviceStep, HostPlan
from worker.model import Model, random_model

BLOCK_SIZE = 16
MAX_DRAFTS = 3


def tiny_model(attention: str) -> Model:
    return random_model(
        tiny_config(), seed=3, dtype=torch.float32, attention=attention, num_blocks=40, block_size=BLOCK_SIZE
    )


@pytest.fixture(scope="module")
def host_model() -> Model:
    return tiny_model("cpu")


@pytest.fixture(scope="module")
def device_model() -> Model:
    return tiny_model("triton")


@pytest.mark.parametrize("seed", [1])
def test_device_rows_stream_the_hosts_tokens_for_any_chunks_drafts_and_company(
    host_model: Model, device_model: Model, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    requests = tiny_requests(3, generator)
    expected = [host_stream(host_model, request) for request in requests]
    streams = DeviceStreams(device_model, requests, max_drafts=MAX_DRAFTS, device="cpu")
    while not streams.done:
        streams.draft(expected, generator, spoil=0.3)
        streams.step(generator)
    assert streams.outputs == expected
    assert 0.2 < streams.num_accepted / streams.num_verified < 0.9


def test_a_plan_of_a_padded_size_and_its_eager_twin_give_the_same_answer(device_model: Model) -> None:
    request = TinyRequest(prompt=[5, 6, 7], max_tokens=4, sampling=SamplingParams(temperature=0.0))
    outputs = []
    for padded_sizes in ((4,), ()):
        streams = DeviceStreams(device_model, [request], max_drafts=MAX_DRAFTS, device="cpu", padded_sizes=padded_sizes)
        while not streams.done:
            streams.step(np.random.default_rng(0))
        outputs.append(streams.outputs)
    assert outputs[0] == outputs[1]


def test_graphs_without_a_cuda_device_are_refused() -> None:
    state = DeviceRows.empty(max_num_seqs=1, max_model_len=32, block_size=16, device="cpu")
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device"):
        DeviceStep(NoModel(), state, max_drafts=1, use_graphs=True)


def test_a_step_whose_graph_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    state = DeviceRows.empty(max_num_seqs=1, max_model_len=32, block_size=16, device="cpu")
    state.num_tokens[0], state.num_computed[0], state.end[0] = 10, 9, 12
    step = DeviceStep(NoModel(), state, max_drafts=0)
    step.use_graphs = True  # on a machine without CUDA every capture fails
    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    plan = HostPlan(rows=none, num_scheduled=one, num_drafts=none, reserved=one, max_seq_len=11)
    assert step.execute(plan).acceptance.token_ids.tolist() == [[11]]
    assert step.execute(plan).acceptance.token_ids.tolist() == [[12]]
    assert step.num_graphs == 0
    assert caplog.text.count("running without") == 1


def test_a_plan_brings_only_upper_bounds_and_the_row_takes_what_is_true() -> None:
    state = DeviceRows.empty(max_num_seqs=2, max_model_len=64, block_size=16, device="cpu")
    state.num_tokens[1], state.num_computed[1], state.end[1] = 10, 9, 12
    step = DeviceStep(NoModel(), state, max_drafts=3)
    columns = [np.array([value], np.int32) for value in (1, 4, 3, 4)]
    plan = HostPlan(
        rows=columns[0], num_scheduled=columns[1], num_drafts=columns[2], reserved=columns[3], max_seq_len=14
    )
    acceptance = step.execute(plan).acceptance
    assert acceptance.num_tokens.tolist() == [1]  # the row had no drafts
    assert acceptance.token_ids[0].tolist() == [11, -1, -1, -1]
    assert int(step.execute(plan).acceptance.num_tokens[0]) == 1  # one token below its end
    assert int(step.execute(plan).acceptance.num_tokens[0]) == 0  # at its end


class NoModel:
    """The next token is the position of the token before it, plus two."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.positions[:, None].float()

    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("nobody wants states")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -(torch.arange(64.0)[None] - hidden - 2.0).abs()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_draft_step_feeds_each_row_its_lookahead_token(step: int) -> None:
    generator = np.random.default_rng(step)
    state = DeviceRows.empty(max_num_seqs=6, max_model_len=64, block_size=16, device="cpu")
    state.token_ids.copy_(torch.from_numpy(generator.integers(0, 99, state.token_ids.shape)))
    state.block_table.copy_(torch.from_numpy(generator.permutation(24).reshape(6, 4)))
    state.num_tokens.copy_(torch.tensor([15, 16, 17, 1, 30, 33]))
    state.end.copy_(state.num_tokens + torch.tensor([30, 30, 2, 30, 3, 30]))
    rows = torch.tensor([4, 2, -1, 0, 1], dtype=torch.int32)
    num_propose = torch.tensor([3, 3, 0, 1, 3], dtype=torch.int32)
    batch, sample_rows, sample_positions = gather_drafts(state, rows, num_propose, step=step)
    for req, expected in enumerate(gather_drafts_reference(state, rows, num_propose, step=step)):
        if expected is None:
            assert (int(batch.slot_mapping[req]), int(batch.seq_lens[req]), int(sample_rows[req])) == (-1, 0, -1)
            continue
        columns = (batch.token_ids, batch.positions, batch.slot_mapping)
        assert tuple(int(column[req]) for column in columns) == expected
        assert int(batch.seq_lens[req]) == expected[1] + 1
        assert (int(sample_rows[req]), int(sample_positions[req])) == (int(rows[req]), expected[1] + 1)
    assert batch.cu_seqlens_q.tolist() == list(range(6))


def test_drafts_are_appended_in_order_and_stop_at_a_failure() -> None:
    state = DeviceRows.empty(max_num_seqs=3, max_model_len=64, block_size=16, device="cpu")
    state.num_tokens.copy_(torch.tensor([5, 6, 7]))
    rows = torch.tensor([2, 0, -1], dtype=torch.int32)
    for step, sampled in enumerate(([40, 50, 60], [-1, 51, 61], [42, 52, 62])):
        append_drafts(state, rows, torch.tensor(sampled, dtype=torch.int32), step=step)
    assert state.num_drafts.tolist() == [3, 0, 1]
    assert state.token_ids[0, 5:8].tolist() == [50, 51, 52]
    assert state.token_ids[2, 7:10].tolist() == [40, 0, 0]


def test_a_draft_model_that_is_the_target_drafts_what_the_target_samples(
    host_model: Model, device_model: Model
) -> None:
    generator = np.random.default_rng(7)
    [request] = tiny_requests(1, generator)
    expected = host_stream(host_model, request)
    streams = DeviceStreams(device_model, [request], max_drafts=MAX_DRAFTS, device="cpu")

    def logits_of(batch: Batch) -> torch.Tensor:
        return device_model.logits(device_model.forward(batch))

    num_steps = 0
    while not streams.done:
        streams.step(generator)
        num_steps += 1
        propose_drafts(
            streams.state,
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([MAX_DRAFTS], dtype=torch.int32),
            max_drafts=MAX_DRAFTS if streams.outputs[0] else 0,
            logits_of=logits_of,
        )
    assert streams.outputs == [expected]
    assert streams.num_accepted == streams.num_verified > 0
