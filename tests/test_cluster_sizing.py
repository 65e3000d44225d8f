"""From flags and a checkpoint's config.json to the sizes of a deployment."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ServeConfig, SpeculativeConfig
from cluster.errors import ConfigError
from cluster.sizing import CPU_POOL_BYTES, ModelShape, size
from tests.tiny_model import CONFIG, MAX_LEN, save_tiny_model

BLOCK_BYTES = 2 * 2 * 2 * 32 * 16 * 4  # key and value, layers, KV heads, head size, tokens, fp32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path)
    return tmp_path


def rewrite(directory: Path, **changes: object) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_a_block_holds_key_and_value_of_all_layers(directory: Path) -> None:
    shape = ModelShape.from_directory(directory)
    assert shape.bytes_per_block(16, "float32") == BLOCK_BYTES
    assert shape.bytes_per_block(32, "bfloat16") == BLOCK_BYTES


def test_the_pool_on_a_cpu_holds_no_more_than_its_rows_can_use(directory: Path) -> None:
    [worker] = size(ServeConfig(device="cpu", max_num_seqs=4), directory).workers
    assert worker.num_blocks == 4 * MAX_LEN // 16


def test_the_pool_on_a_cpu_is_capped(directory: Path) -> None:
    sizes = size(ServeConfig(device="cpu", max_num_seqs=1 << 16, data_parallel_size=2), directory)
    most = CPU_POOL_BYTES // BLOCK_BYTES
    assert all(worker.num_blocks is not None and worker.num_blocks <= most for worker in sizes.workers)


def test_the_pool_can_be_given_and_is_what_the_scheduler_measures_requests_against(directory: Path) -> None:
    sizes = size(ServeConfig(device="cpu", num_gpu_blocks_override=20), directory)
    assert [worker.num_blocks for worker in sizes.workers] == [20]
    assert sizes.scheduler.largest_pool_blocks == 20


def test_workers_of_one_machine_have_cores_of_their_own_where_there_are_enough(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 3, 5})

    def cores(**flags: Any) -> list[tuple[int, ...] | None]:
        return [worker.cores for worker in size(ServeConfig(device="cpu", **flags), directory).workers]

    assert cores(data_parallel_size=2, threads=2) == [(2, 3), (5, 7)]
    assert cores(data_parallel_size=2) == [(2,), (3,)]  # one stays for the scheduler
    assert cores(data_parallel_size=3, threads=1) == [(2,), (3,), (5,)]
    assert cores(data_parallel_size=3, threads=2) == [None] * 3  # too few
    assert cores() == [None]
    assert cores(data_parallel_size=2, address="auto") == [None] * 2  # who knows on which machines


def test_workers_share_all_cores_but_one_unless_told_how_many_threads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(9)))
    assert {w.threads for w in size(ServeConfig(), directory).workers} == {8}
    assert {w.threads for w in size(ServeConfig(data_parallel_size=3), directory).workers} == {2}
    assert {w.threads for w in size(ServeConfig(data_parallel_size=10), directory).workers} == {1}
    assert {w.threads for w in size(ServeConfig(threads=3), directory).workers} == {3}


def test_the_models_own_type_is_served_unless_another_is_asked_for(directory: Path) -> None:
    assert size(ServeConfig(), directory).dtype == "float32"
    assert size(ServeConfig(dtype="bfloat16"), directory).dtype == "bfloat16"
    rewrite(directory, torch_dtype="int8")
    with pytest.raises(ConfigError, match="--dtype auto: the model's own dtype 'int8'"):
        size(ServeConfig(), directory)


def test_drafts_reach_the_scheduler_and_the_workers(directory: Path) -> None:
    sizes = size(ServeConfig(speculative=SpeculativeConfig(num_speculative_tokens=3)), directory)
    assert sizes.scheduler.max_drafts == sizes.workers[0].drafts.max_drafts == 3


def test_triton_on_a_cpu_runs_in_the_interpreter(directory: Path) -> None:
    [worker] = size(ServeConfig(device="cpu", attention="triton"), directory).workers
    assert worker.environment()["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in size(ServeConfig(device="cpu"), directory).workers[0].environment()


def test_a_config_without_a_needed_number_is_refused_by_name(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    with pytest.raises(ConfigError, match="has no usable 'num_hidden_layers'"):
        size(ServeConfig(), directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        size(ServeConfig(), directory)


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        size(ServeConfig(), directory)
