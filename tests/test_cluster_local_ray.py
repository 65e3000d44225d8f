"""A local Ray cluster that does not come up. In unit tests `ray.init` raises."""

import tempfile
from pathlib import Path

import pytest

from cluster.errors import BringUpError
from cluster.local_ray import LocalRay


def test_a_cluster_that_does_not_start_is_tried_again_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def mkdtemp(**_: object) -> str:
        made.append(tmp_path / str(len(made)))
        made[-1].mkdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(BringUpError, match=r"^Ray did not start: a unit test started Ray"):
        LocalRay(num_cpus=1)
    assert len(made) == 3
    assert not any(path.exists() for path in made)


def test_an_interruption_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise SystemExit(15)  # how Ray takes SIGTERM while it starts

    monkeypatch.setattr("ray.init", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalRay(num_cpus=1)
