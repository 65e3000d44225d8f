"""Generates the stubs of the wires: `python -m protos.generate [DIRECTORY]`.

Runs protoc from the repository root with -I., so that stubs say `from protos import ...`.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "slipstream": ("python", "pyi", "grpc_python"),
    "kserve": ("python", "pyi", "grpc_python"),
    "worker": ("python", "pyi"),
}
SUFFIXES = {"python": "_pb2.py", "pyi": "_pb2.pyi", "grpc_python": "_pb2_grpc.py"}
STUBS = tuple(f"protos/{name}{SUFFIXES[kind]}" for name, kinds in KINDS.items() for kind in kinds)


def generate(directory: Path) -> None:
    """Writes STUBS under `directory`. Raises CalledProcessError when protoc finds a fault."""
    for name, kinds in KINDS.items():
        outputs = [f"--{kind}_out={directory}" for kind in kinds]
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, f"protos/{name}.proto"]
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
