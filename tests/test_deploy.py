"""What deploy/ ships: `ray up` files against Ray's own schema, the Kubernetes file and the Dockerfile against rules.

Nothing here starts a cloud, a Kubernetes or a docker build: those were not tried. `tests/test_rayup.py` does run
the on-premise file.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from cluster.processes import executable

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
RAY_UP_FILES = ("aws.yaml", "gcp.yaml", "onprem.yaml")
CLOUD_FILES = ("aws.yaml", "gcp.yaml")
GPU = "nvidia.com/gpu"


def _loaded(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return loaded


def _prepared(name: str) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config

    prepared: dict[str, Any] = prepare_config(_loaded(name))
    return prepared


# ---- ray up ----


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_rays_own_schema_accepts_each_ray_up_file(name: str) -> None:
    from ray.autoscaler._private.util import validate_config

    validate_config(_prepared(name))


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_rays_schema_refuses_the_same_file_with_a_misspelt_key(name: str) -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(ValidationError, match="setup_comands"):
        validate_config(_prepared(name) | {"setup_comands": []})


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_what_must_be_filled_in_stands_in_one_block_at_the_top(name: str) -> None:
    before, block, rest = re.split(r"# ---- (?:fill in|end of what).*\n", (DEPLOY / name).read_text())
    assert yaml.safe_load(before) is None
    assert {"cluster_name", "provider", "auth", "max_workers"} <= set(yaml.safe_load(block))
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", rest.replace("127.0.0.1", "")), "an address outside the block"


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_ray_is_started_with_a_token_on_a_loopback_dashboard_and_sends_no_statistics(name: str) -> None:
    config = _loaded(name)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        *_, start = config[key]
        assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0", "--disable-usage-stats"} <= set(start.split())
    head = config["head_start_ray_commands"][-1].split()
    assert {"--head", "--dashboard-host=127.0.0.1", "--autoscaling-config=~/ray_bootstrap_config.yaml"} <= set(head)
    assert "--address=$RAY_HEAD_IP:6379" in config["worker_start_ray_commands"][-1].split()
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert ".git" in config["rsync_exclude"]


@pytest.mark.parametrize("name", CLOUD_FILES)
def test_a_clouds_head_has_no_gpu_and_its_workers_may_be_spot_ones(name: str) -> None:
    config = _prepared(name)
    types = config["available_node_types"]
    head = types[config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert sum(kind.get("min_workers", 0) for kind in types.values()) <= config["max_workers"]
    spot = {kind for kind, node in types.items() if {"SPOT", "spot"} & set(_leaves(node["node_config"]))}
    workers = set(types) - {config["head_node_type"]}
    assert spot == {"gpu-spot"} < workers
    assert all(types[kind]["resources"]["slipstream"] == 1 for kind in workers)


def test_on_premise_every_worker_is_asked_for() -> None:
    config = _loaded("onprem.yaml")
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    assert config["provider"]["head_ip"] not in config["provider"]["worker_ips"]


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_every_command_of_a_ray_up_file_is_bash(name: str) -> None:
    config = _loaded(name)
    keys = ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    for command in (command for key in keys for command in config[key]):
        assert subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0, command


def _leaves(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value)
    else:
        yield str(node)


# ---- ray start ----


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """An environment whose `ray` says how it was called, and which has no nvidia-smi."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    ray = tmp_path / "venv" / "bin" / "ray"
    ray.write_text('#!/bin/bash\nprintf "%s\\n" "$RAY_AUTH_MODE$RAY_USAGE_STATS_ENABLED" "$@"\n')
    ray.chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    return {"HOME": str(tmp_path), "VENV": str(tmp_path / "venv"), "PATH": "/usr/bin:/bin"}


def _ray_start(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(DEPLOY / "ray-start.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_script_starts_a_head_and_workers(stand_in: dict[str, str]) -> None:
    head = _ray_start(stand_in | {"NODE_IP": "10.0.0.10"}, "head").stdout.splitlines()
    assert head[:3] == ["token0", "start", "--head"]
    assert {"--port=6379", "--node-ip-address=10.0.0.10", "--dashboard-host=127.0.0.1"} <= set(head)
    worker = _ray_start(stand_in | {"WORKERS": "4"}, "worker", "10.0.0.10").stdout.splitlines()
    assert {"--address=10.0.0.10:6379", '--resources={"slipstream": 4}', "--disable-usage-stats"} <= set(worker)
    assert '--resources={"slipstream": 1}' in _ray_start(stand_in, "worker", "10.0.0.10").stdout.splitlines()
    assert _ray_start(stand_in, "stop").stdout.splitlines() == ["token0", "stop"]


def test_the_script_starts_nothing_without_a_token_or_on_wrong_arguments(stand_in: dict[str, str]) -> None:
    for arguments in ([], ["worker"], ["master"]):
        wrong = _ray_start(stand_in, *arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "deploy/ray-start.sh worker HEAD_IP" in wrong.stderr
    os.remove(Path(stand_in["HOME"], ".ray", "auth_token"))
    assert _ray_start(stand_in, "head").returncode == 1


# ---- Kubernetes ----

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
PROBE = {
    "type": "object",
    "properties": {
        "grpc": {"type": "object", "required": ["port"], "properties": {"port": {"type": "integer"}}},
        "tcpSocket": {"type": "object", "required": ["port"]},
        **{key: {"type": "integer"} for key in ("periodSeconds", "timeoutSeconds", "failureThreshold")},
    },
    "additionalProperties": False,
}
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "command", "args", "resources"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        "ports": {"type": "array", "items": {"type": "object", "required": ["name", "containerPort"]}},
        "resources": {
            "type": "object",
            "properties": {"requests": STRINGS, "limits": STRINGS},
            "additionalProperties": False,
        },
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
        "securityContext": {"type": "object"},
        **{key: PROBE for key in ("startupProbe", "readinessProbe", "livenessProbe")},
    },
    "additionalProperties": False,
}
TEMPLATE = {
    "type": "object",
    "required": ["metadata", "spec"],
    "properties": {
        "metadata": {"type": "object", "properties": {"labels": STRINGS}},
        "spec": {
            "type": "object",
            "required": ["containers", "volumes", "securityContext"],
            "properties": {
                "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                "volumes": {"type": "array"},
                "securityContext": {"type": "object"},
                "terminationGracePeriodSeconds": {"type": "integer"},
                "tolerations": {"type": "array"},
                "topologySpreadConstraints": {"type": "array"},
            },
            "additionalProperties": False,
        },
    },
}
# The part of KubeRay's ray.io/v1 RayCluster (1.6) that the file uses: names and types, nothing else allowed.
RAY_CLUSTER = {
    "type": "object",
    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs", "gcsFaultToleranceOptions", "authOptions"],
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {"type": "object", "properties": {"mode": {"enum": ["disabled", "token"]}}},
        "gcsFaultToleranceOptions": {
            "type": "object",
            "required": ["redisAddress"],
            "properties": {
                "redisAddress": {"type": "string"},
                "redisPassword": {"type": "object", "required": ["valueFrom"]},
                "externalStorageNamespace": {"type": "string"},
            },
            "additionalProperties": False,
        },
        "headGroupSpec": {
            "type": "object",
            "required": ["rayStartParams", "template"],
            "properties": {"rayStartParams": STRINGS, "template": TEMPLATE},
            "additionalProperties": False,
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                "properties": {
                    "groupName": {"type": "string"},
                    **{key: {"type": "integer", "minimum": 0} for key in ("replicas", "minReplicas", "maxReplicas")},
                    "rayStartParams": STRINGS,
                    "template": TEMPLATE,
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


@pytest.fixture(scope="module")
def spec(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = [one["spec"] for one in manifests if one["kind"] == "RayCluster"]
    assert isinstance(found, dict)
    return found


def _templates(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **groups}


def test_the_kubernetes_file_has_the_objects_it_needs(manifests: list[dict[str, Any]]) -> None:
    kinds = [(one["apiVersion"], one["kind"]) for one in manifests]
    assert kinds == [
        ("ray.io/v1", "RayCluster"),
        ("v1", "Service"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("policy/v1", "PodDisruptionBudget"),
        ("policy/v1", "PodDisruptionBudget"),
    ]
    assert len({(one["kind"], one["metadata"]["name"]) for one in manifests}) == len(manifests)


def test_the_ray_cluster_fits_the_written_down_schema(spec: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(RAY_CLUSTER)
    errors = [f"{error.json_path}: {error.message}" for error in Draft202012Validator(RAY_CLUSTER).iter_errors(spec)]
    assert errors == []
    misspelt = spec | {"gcsFaultTolerance": {}}
    assert list(Draft202012Validator(RAY_CLUSTER).iter_errors(misspelt))


def test_the_versions_of_ray_are_those_of_the_project(spec: dict[str, Any]) -> None:
    import ray

    assert spec["rayVersion"] == ray.__version__


def test_services_and_budgets_select_pods_that_exist(manifests: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    labels = [template["metadata"]["labels"] for template in _templates(spec).values()]
    for one in manifests[1:]:
        selector = one["spec"].get("selector") or one["spec"]["podSelector"]
        selected = selector.get("matchLabels", selector)
        assert any(selected.items() <= owned.items() for owned in labels), one["metadata"]["name"]
    [service] = [one["spec"] for one in manifests if one["kind"] == "Service"]
    [serve] = [
        template
        for template in _templates(spec).values()
        if service["selector"].items() <= template["metadata"]["labels"].items()
    ]
    ports = {port["name"]: port["containerPort"] for port in serve["spec"]["containers"][0]["ports"]}
    [port] = service["ports"]
    assert ports[port["targetPort"]] == port["port"]


def test_the_server_is_probed_over_grpc_on_the_port_it_is_told(spec: dict[str, Any]) -> None:
    [container] = _templates(spec)["serve"]["spec"]["containers"]
    [port] = [port["containerPort"] for port in container["ports"]]
    assert container["readinessProbe"]["grpc"] == container["startupProbe"]["grpc"] == {"port": port}
    [command] = container["args"]
    assert f"--port {port} " in command
    assert subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0
    [workers] = [group for group in spec["workerGroupSpecs"] if group["groupName"] == "workers"]
    assert f"--data-parallel-size {workers['replicas']} " in command
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {"slipstream": 1}


def test_only_workers_have_gpus_and_no_pod_runs_as_root(spec: dict[str, Any]) -> None:
    for name, template in _templates(spec).items():
        [container] = template["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert (GPU in limits) == (name == "workers")
        assert container["resources"]["requests"].get(GPU) == limits.get(GPU)
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


# ---- Dockerfile ----


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    pairs = [line.partition(" ")[::2] for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in pairs]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    command = [str(executable("hadolint")), str(DEPLOY / "Dockerfile")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""


def test_the_dockerfile_keeps_the_usual_rules() -> None:
    instructions = _instructions()
    known = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} <= known
    for name, rest in instructions:
        if name == "FROM":
            assert re.match(r"(base|\S+:\d[\w.-]*) AS \w+$", rest), f"no version or no name: {rest}"
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert rest.startswith("apt-get update && ")
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
        assert not re.search(r"\bsudo\b|--privileged|curl .*\| *(ba)?sh|(TOKEN|PASSWORD|SECRET)=", rest)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_each_target_of_the_dockerfile_is_not_root_and_keeps_models_in_a_volume(target: str) -> None:
    instructions = _instructions()
    start = next(i for i, (name, rest) in enumerate(instructions) if name == "FROM" and rest.endswith(f" AS {target}"))
    stage = []
    for name, rest in instructions[start + 1 :]:
        if name == "FROM":
            break
        stage.append((name, rest))
    users = [index for index, (name, _) in enumerate(stage) if name == "USER"]
    assert [stage[index][1] for index in users] == ["10001"]
    assert not [name for name, _ in stage[users[0] :] if name in ("RUN", "COPY")], "made by root, not by the user"
    assert ("VOLUME", "/var/cache/slipstream") in stage
    [cache] = re.findall(r"SLIPSTREAM_CACHE=(\S+)", " ".join(rest for name, rest in instructions if name == "ENV"))
    assert cache.startswith("/var/cache/slipstream/")
    assert stage[-2:] == [("ENTRYPOINT", '["slipstream"]'), ("CMD", '["serve"]')]


def test_the_dockerfile_installs_the_torch_of_the_project() -> None:
    [pin] = re.findall(r'"(torch==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    installs = [rest for name, rest in _instructions() if name == "RUN" and "pip install torch" in rest]
    assert len(installs) == 2
    assert all(pin in install.split() for install in installs)
