"""Generates the stubs of slipstream.proto: `python -m protos.generate [DIRECTORY]`.

Runs protoc from the repository root with -I., so that stubs say `from protos import ...`.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ("protos/slipstream_pb2.py", "protos/slipstream_pb2.pyi", "protos/slipstream_pb2_grpc.py")


def generate(directory: Path) -> None:
    """Writes STUBS under `directory`. Raises CalledProcessError when protoc finds a fault."""
    outputs = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "protos/slipstream.proto"]
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
