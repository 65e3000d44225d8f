"""The pure parts of the benchmark beside the peers."""

from tests.bench.peers.__main__ import rows_of
from tests.bench.peers.environments import wanted


def test_a_wheel_s_requirements_are_kept_but_for_extras_and_what_text_does_not_need() -> None:
    kept = ["regex", "protobuf!=6.30.*,>=5.29.6", "mcp<3.0.0,>=2.0.0", "fastapi[standard]<0.137.0"]
    left = ["torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchvision; python_version > '3'", "av; extra == 'a'"]
    assert wanted(kept + left) == kept


def test_a_ratio_is_the_median_of_each_round_s_own() -> None:
    rows = rows_of(8, {"ours": [100.0, 50.0, 200.0], "vllm": [90.0, 60.0, 100.0]})
    assert [row["setting"] for row in rows] == ["ours", "vllm"]
    assert [rows[1][key] for key in ("tokens_per_s", "of_ours", "of_ours_min", "of_ours_max")] == [90.0, 0.9, 0.5, 1.2]
