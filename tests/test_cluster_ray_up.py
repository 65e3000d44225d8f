"""`slipstream up FILE` and `down FILE` with stand-ins for `ray` and `ssh`; Ray's own schema is the real one."""

import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from cluster import ray_up
from cluster.errors import BringUpError, ConfigError
from cluster.ray_up import RayUp

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
STAND_IN = f"""#!{sys.executable}
import os, sys
from pathlib import Path
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(Path(sys.argv[0]).name, *sys.argv[1:], os.environ.get("RAY_UP_enable_autoscaler_v2"), file=calls)
command = sys.argv[-1]
print("Shared connection to 10.0.0.10 closed.")
for name in ("ray status", "serve.log"):
    answers = here / name
    if command.endswith(name) and answers.exists():
        first, _, rest = answers.read_text().partition("---\\n")
        print(first)
        if rest:
            answers.write_text(rest)
if sys.argv[1] == "up" and (here / "fails").exists():
    sys.exit("no ssh to 10.0.0.10")
"""


def phase(_what: str) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins are, with what they answer one after the other."""
    for name in ("ray", "ssh"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(ray_up, "_ray_executable", lambda: str(tmp_path / "ray"))
    monkeypatch.setattr(ray_up, "POLL_S", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "ray status").write_text("nothing yet\n---\n 0.0/1.0 slipstream\n---\n 0.0/2.0 slipstream\n")
    (tmp_path / "serve.log").write_text("Placing the workers\n---\nready 127.0.0.1:50051\n")
    return tmp_path


def calls(here: Path) -> list[str]:
    return (here / "calls").read_text().splitlines()


def test_up_waits_for_every_worker_and_for_the_server(here: Path) -> None:
    cluster = RayUp.read(DEPLOY / "onprem.yaml")
    assert cluster.up(["--host", "127.0.0.1", "--model", "a b"], phase) == "127.0.0.1:50051"
    up, *statuses, serve, first, second = calls(here)
    assert up == f"ray up --yes --no-config-cache {DEPLOY / 'onprem.yaml'} 0"
    assert len(statuses) == 3
    assert "serve --address auto --data-parallel-size 2 --host 127.0.0.1 --model 'a b'" in serve
    assert first == second
    assert cluster.tunnel("127.0.0.1:50051") == "ssh -f -N -L 50051:127.0.0.1:50051 slipstream@10.0.0.10"
    assert cluster.tunnel("10.0.0.10:50051") is None


def test_down_stops_workers_that_ray_down_leaves(here: Path) -> None:
    RayUp.read(DEPLOY / "onprem.yaml").down(phase)
    stop, head, down, *workers = calls(here)
    assert "slipstream down" in stop
    assert head.startswith("ray exec")
    assert head.endswith("/ray stop 0")
    assert down == f"ray down --yes {DEPLOY / 'onprem.yaml'} 0"
    assert [worker.split()[-4] for worker in workers] == ["slipstream@10.0.0.11", "slipstream@10.0.0.12"]


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_a_cloud_stops_its_own_machines(here: Path, name: str) -> None:
    cluster = RayUp.read(DEPLOY / name)
    assert cluster.num_workers >= 1
    cluster.down(phase)
    assert not any(call.startswith("ssh") for call in calls(here))
    tunnel = cluster.tunnel("127.0.0.1:50051")
    assert tunnel is not None
    assert tunnel.startswith("ray attach --port-forward 50051 ")


def test_what_fails_on_the_way_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RayUp.read(DEPLOY / "onprem.yaml")
    (here / "fails").touch()
    with pytest.raises(BringUpError, match=r"`ray up .*` ended with 1: no ssh to 10.0.0.10"):
        cluster.up([], phase)
    (here / "fails").unlink()
    (here / "serve.log").write_text("error: --model: there is no such\n")
    with pytest.raises(BringUpError, match="on the head: --model: there is no such"):
        cluster.up([], phase)
    monkeypatch.setattr(ray_up, "WORKERS_TIMEOUT_S", 0.2)
    (here / "ray status").write_text(" 0.0/1.0 slipstream\n")
    with pytest.raises(BringUpError, match=r"the workers do not join within 0.2 s"):
        cluster.up([], phase)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"setup_comands": []}, "setup_comands"),
        ({"cluster_name": 5}, "cluster_name: 5 is not of type 'string'"),
        ({"provider": None}, "Ray cannot prepare it|provider"),
    ],
)
def test_a_file_that_ray_would_refuse_is_refused_here(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = yaml.safe_load((DEPLOY / "onprem.yaml").read_text()) | change
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=message):
        RayUp.read(tmp_path / "file.yaml")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RayUp.read(tmp_path / "nowhere.yaml")
    for content, message in (("a: [", "is not YAML"), ("- a", "no `ray up` file")):
        (tmp_path / "file.yaml").write_text(content)
        with pytest.raises(ConfigError, match=message):
            RayUp.read(tmp_path / "file.yaml")
    shutil.copy(DEPLOY / "onprem.yaml", tmp_path / "file.yaml")
    config = yaml.safe_load((tmp_path / "file.yaml").read_text()) | {"min_workers": 0}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="min_workers is 0"):
        RayUp.read(tmp_path / "file.yaml").up([], phase)
