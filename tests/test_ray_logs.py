"""The logs of a real `serve`: one JSON object a line, with the request's id, and never what a request asks."""

import json
from pathlib import Path

import pytest

from cluster.client import Client
from tests.serve_process import serve_process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = "the quick xylophone jumps"


def test_no_prompt_is_in_any_log_and_each_line_is_json_with_the_id(tmp_path: Path) -> None:
    file = tmp_path / "log"
    flags = ("--log-format", "json", "--log-level", "debug", "--log-file", str(file))
    with serve_process(tmp_path, *flags) as served:
        _, directory = served.started()
        with Client(served.address) as client:
            client.generate(PROMPT, request_id="asked", max_tokens=24, ignore_eos=True).result()
        # Ray's own files, which end with the deployment.
        kept = [path.read_bytes() for path in directory.glob("session_*/logs/**/*") if path.is_file()]
        assert len(kept) > 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    events = [line["event"] for line in lines if line.get("request_id") == "asked"]
    assert sorted(events) == ["admitted", "finished", "first token", "seated"]
    assert {line["process"] for line in lines} == {"serve", "scheduler", "worker-0", "front-0"}
    for content in (file.read_bytes(), served.errors.encode(), *kept):
        assert b"xylophone" not in content
