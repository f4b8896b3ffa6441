"""A release: a complete wheel and sdist, and the project that `workbench init` makes."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import nbformat
import pytest

import workbench
from tests.fresh_environment import build_release
from tests.helpers.command_line import cli, refused
from tools.lint.zoo import forbidden_imports
from workbench.cli.init import NEXT, TEMPLATE
from workbench.experiment.experiment import Experiment
from workbench.lab.course import FIRST_PICTURE
from workbench.lab.start import notebooks_in
from workbench.testing import check_sampler

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["README.md", "first.yaml", "mask.py", "notebook.ipynb", "sampler.py", "test_laws.py"]
TEXTS = (".py", ".yaml", ".json", ".j2", ".md", ".js", ".css", ".toml", ".ipynb")
MAX_WHEEL_MIB = 40  # the wheel, with the weights of the demo models
PACKAGES = ("workbench", "compiled_kernels")
DATA = ("experiments", "notebooks")  # within the package: tools/wheel.py
ABSOLUTE = re.compile(rb"(?<![\w./])/(?:work|root|home|Users)/\w")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    cli("init lab")
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


@pytest.mark.processes
def test_the_wheel_has_nothing_of_the_checkout_and_says_what_it_needs(release: tuple[Path, Path]) -> None:
    wheel = release[1]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"inference_workbench-{workbench.__version__}.dist-info"
        extension = info.replace(".dist-info", ".data")  # of JupyterLab, which looks for it beside the interpreter
        assert {name.split("/")[0] for name in names} == {*PACKAGES, info, extension}
        manifest = f"{extension}/data/share/jupyter/labextensions/inference-workbench/package.json"
        assert json.loads(archive.read(manifest))["version"] == workbench.__version__
        assert [name for name in names if re.search(r"__pycache__|\.pyc$|/pictures/(?!start)|/\.|^/|\.\.", name)] == []
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        assert metadata["Version"] == workbench.__version__ and metadata["License-Expression"] == "MIT"
        core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
        named = {re.split(r"[^\w-]", line)[0] for line in core}
        assert {"torch", "hypothesis", "pytest", "jupyterlab"} <= named and not {"fastapi", "redis"} & named
        texts = [name for name in names if name.endswith(TEXTS)]
        assert [name for name in texts if ABSOLUTE.search(archive.read(name))] == []
    assert wheel.stat().st_size < MAX_WHEEL_MIB << 20


@pytest.mark.processes
def test_wheel_and_sdist_have_every_tracked_file(release: tuple[Path, Path]) -> None:
    sdist, wheel = release
    source = sdist.parent.parent / "source"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    tracked = {name for name in files if not re.search(r"\.egg-info/|^build/", name)}
    with zipfile.ZipFile(wheel) as archive:
        left_out = re.compile(r"\.md$|/pictures/(?!start)")
        found = {name.removeprefix("workbench/_checkout/") for name in archive.namelist()}
        packed = {name for name in tracked if name.startswith((*PACKAGES, *DATA)) and not left_out.search(name)}
        assert packed - found == set(), "declare it in pyproject.toml: tool.setuptools.package-data"
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    assert tracked - names == set(), "name it in MANIFEST.in"
    assert [name for name in names - tracked if not re.search(r"^PKG-INFO$|^setup\.cfg$|\.egg-info/", name)] == []


def test_init_copies_the_project_and_says_what_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for folder in ("lab", "there", "deep/in/here"):
        said = cli("init", folder).out
        assert f"cd {folder}" in said and all(command in said for command in NEXT)
        assert sorted(path.name for path in Path(folder).iterdir()) == NAMES
        assert all((Path(folder) / name).read_bytes() == (TEMPLATE / name).read_bytes() for name in NAMES)
    assert sorted(path.name for path in TEMPLATE.iterdir() if path.is_file()) == NAMES


@pytest.mark.parametrize("command", ["init", "init --course"])
def test_init_overwrites_nothing(command: str, project: Path) -> None:
    (project / "mask.py").write_text("mine")
    before = {path: path.read_bytes() for path in project.iterdir()}
    assert "is not empty (README.md, first.yaml, mask.py, ...); give a new one" in refused(command, project)
    assert {path: path.read_bytes() for path in project.iterdir()} == before
    assert "is a file; give a new folder" in refused("init", project / "mask.py")


def test_init_brings_the_course_where_it_is_asked_for(tmp_path: Path) -> None:
    cli("init --course", tmp_path / "lab")
    folders = (tmp_path / "lab" / "notebooks", ROOT / "notebooks")
    copied, own = ({path.name: path.read_bytes() for path in notebooks_in(folder)} for folder in folders)
    assert copied == own and len(own) >= 12
    assert (folders[0] / FIRST_PICTURE).read_bytes() == (folders[1] / FIRST_PICTURE).read_bytes()


def test_the_experiment_and_the_filter_of_the_project(project: Path) -> None:
    experiment = Experiment.from_file(Path("first.yaml"))
    variants = [experiment.variant(name) for name in experiment.variants]
    assert variants and all(Experiment.from_yaml(variant.to_yaml()) == variant for variant in variants)
    check_sampler("sampler.py:TopA", examples=20).raise_if_failed()
    source = (project / "sampler.py").read_text()
    (project / "sampler.py").write_text(source.replace("logits.masked_fill(", "logits.masked_fill_("))
    assert not check_sampler("sampler.py:TopA", examples=20).passed


def test_the_files_of_the_project_use_the_public_api_alone() -> None:
    document = nbformat.read(TEMPLATE / "notebook.ipynb", as_version=4)
    nbformat.validate(document)
    cells = [cell for cell in document.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    lines = [line for cell in cells for line in cell.source.splitlines() if not line.startswith("%")]
    sources = {name: (TEMPLATE / name).read_text(encoding="utf-8") for name in NAMES if name.endswith(".py")}
    found = {name: forbidden_imports(source) for name, source in (sources | {"": "\n".join(lines)}).items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {"": ["mask.Dilated"], "test_laws.py": ["pytest"]}


def test_what_the_project_says_of_itself_is_so() -> None:
    text = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in NAMES if name != "README.md")
    assert all(cli(f"{command} --help") for command in re.findall(r"^workbench (\S+)", text, re.M))
