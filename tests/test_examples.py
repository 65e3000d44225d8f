"""examples/ and the README's Python, run as they stand against a server: only its address and its model differ."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.text import load_tokenizer
from tests import tiny_tokenizer
from tests.whole_stack import whole_stack

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    tokenizer = load_tokenizer(tiny_tokenizer.save(tmp_path))  # with a chat template
    async with whole_stack(tokenizer=tokenizer) as up:
        yield up.server.address


async def run(*command: str) -> str:
    """What it says; AssertionError when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_the_quickstart_streams_and_its_seed_repeats(address: str) -> None:
    assert "another start: " in await run(sys.executable, str(EXAMPLES / "quickstart.py"), address)


async def test_many_at_once_are_answered_and_one_is_left(address: str) -> None:
    said = await run(sys.executable, str(EXAMPLES / "many_at_once.py"), address)
    assert said.startswith("left after ")
    assert said.count("->") == 4


async def test_grpcurl_needs_nothing_but_reflection(address: str) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not installed (github.com/fullstorydev/grpcurl)")
    said = await run(str(EXAMPLES / "grpcurl.sh"), address)
    for answer in ("slipstream.v1.Inference", "SERVING", '"finish"', "steps", "max_req_input_len", '"ready": true'):
        assert answer in said


@pytest.mark.parametrize("code", README)
async def test_the_readmes_python_runs(address: str, code: str) -> None:
    assert len(README) == 2
    ours = code.replace("127.0.0.1:50051", address).replace('"smollm2"', '"tiny"')
    assert ours != code
    assert await run(sys.executable, "-c", ours)
