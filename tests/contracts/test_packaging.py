"""One workspace, six distributions: what the wheels carry, how one is had alone, by path, by git, and released on its own."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer")
UV = os.environ.get("UV") or shutil.which("uv")
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not on the PATH")
CONVERSE = (
    "import ostinato_rollout\n"
    "from ostinato_tokenization import ContinuousTokens\n"
    "from ostinato_tokenization.testing import tiny_chat_tokenizer\n"
    "print(len(ContinuousTokens(tiny_chat_tokenizer()).build_initial_tokens([{'role': 'user', 'content': 'hi'}]).prompt_ids))\n"
)


def uv(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run uv as if from a shell: this environment and this project are not its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    command = [str(UV), *(str(argument) for argument in arguments)]
    environment = {**kept, "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never", "NO_COLOR": "1", **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


def succeed(*arguments: str | Path, cwd: Path) -> str:
    """What uv prints, where it must succeed."""
    done = uv(*arguments, cwd=cwd)
    assert done.returncode == 0, f"uv {' '.join(map(str, arguments))}\n{done.stderr}"
    return done.stdout


def table(path: Path) -> dict:
    """A TOML file."""
    return tomllib.loads(path.read_text())


def name_of(package: str) -> str:
    """The distribution's name."""
    return "ostinato-" + package.replace("_", "-")


def copy_workspace(target: Path) -> Path:
    """The workspace as a clone would have it."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*cache", "dist")
    for name in ("packages", "tests", "recipes", ".ci"):
        shutil.copytree(REPO / name, target / name, ignore=ignore)
    for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        shutil.copy(REPO / name, target / name)
    return target


def set_version(workspace: Path, package: str, version: str) -> None:
    """Give one package another version."""
    path = workspace / "packages" / package / "pyproject.toml"
    text, changes = re.subn(r'^version = ".+"$', f'version = "{version}"', path.read_text(), flags=re.MULTILINE)
    assert changes == 1
    path.write_text(text)


def test_the_root_depends_on_every_member_and_re_exports_the_engines_extras() -> None:
    """Plain `uv run` has all six packages, `uv sync --extra NAME` any engine, and only vllm and sglang exclude each other."""
    root, engines = table(REPO / "pyproject.toml"), table(REPO / "packages/engines/pyproject.toml")
    assert root["tool"]["uv"]["package"] is False
    required = {re.split(r"[\[>=<]", line)[0] for line in root["project"]["dependencies"]}
    assert required == {name_of(package) for package in PACKAGES} == set(root["tool"]["uv"]["sources"])
    assert {path.parent.name for path in REPO.glob("packages/*/pyproject.toml")} == set(PACKAGES)
    for extra in engines["project"]["optional-dependencies"]:
        assert root["project"]["optional-dependencies"][extra] == [f"ostinato-engines[{extra}]"]
    assert all({entry["extra"] for entry in group} == {"vllm", "sglang"} for group in root["tool"]["uv"]["conflicts"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_carries_the_licence(package: str) -> None:
    """A distribution that is passed on alone has the licence's text with it."""
    assert (REPO / "packages" / package / "LICENSE").read_bytes() == (REPO / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_bounds_admit_the_siblings_of_this_workspace(package: str) -> None:
    """What is developed together can be installed together: uv does not hold workspace members to the bounds, pip does."""
    versions = {
        name_of(other): table(REPO / f"packages/{other}/pyproject.toml")["project"]["version"] for other in PACKAGES
    }
    project = table(REPO / "packages" / package / "pyproject.toml")["project"]
    optional = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    for requirement in map(Requirement, [*project["dependencies"], *optional]):
        if requirement.name in versions:
            assert requirement.specifier.contains(versions[requirement.name])
            # Before 1.0 a minor version may break: the next one is never admitted unseen.
            major, minor, *_ = map(int, versions[requirement.name].split("."))
            assert not requirement.specifier.contains(f"{major}.{minor + 1}.0")


@needs_uv
def test_the_lock_is_up_to_date() -> None:
    """The one lock says what the seven pyproject files say."""
    succeed("lock", "--check", cwd=REPO)


@needs_uv
@pytest.mark.parametrize("extras", [("vllm",), ("sglang",), ("vllm", "transformers"), ("mlflow", "megatron"), ()])
def test_extras_resolve_from_the_one_lock(extras: tuple[str, ...], tmp_path: Path) -> None:
    """Each engine installs from the same lock, over the same torch, without the other engine."""
    options = [option for extra in extras for option in ("--extra", extra)]
    command = ("sync", "--locked", "--dry-run", *options)
    done = uv(*command, cwd=REPO, UV_PROJECT_ENVIRONMENT=str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    planned = dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)", done.stderr, re.MULTILINE))
    locked = {(entry["name"], entry["version"]) for entry in table(REPO / "uv.lock")["package"] if "version" in entry}
    assert set(planned.items()) <= locked
    assert planned["torch"].startswith("2.13.")
    assert "transformers" in planned
    for engine in ("vllm", "sglang"):
        here = sys.platform == "linux" and os.uname().machine == "x86_64" and sys.version_info < (3, 14)
        assert (engine in planned) == (engine in extras and here)


@needs_uv
def test_vllm_and_sglang_together_are_refused(tmp_path: Path) -> None:
    """The two engines pin what the other cannot have, and asking for both says so."""
    command = ("sync", "--locked", "--dry-run", "--extra", "vllm", "--extra", "sglang")
    done = uv(*command, cwd=REPO, UV_PROJECT_ENVIRONMENT=str(tmp_path / "venv"))
    assert done.returncode != 0
    assert re.search(r"`sglang` and `vllm` are incompatible", done.stderr)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The six wheels, each built from its source distribution, which is built from a clone."""
    workspace = copy_workspace(tmp_path_factory.mktemp("clone"))
    folder = tmp_path_factory.mktemp("wheels")
    succeed("build", "--all-packages", "--out-dir", folder, cwd=workspace)
    assert len(list(folder.glob("*.whl"))) == len(list(folder.glob("*.tar.gz"))) == len(PACKAGES)
    return folder


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    """The wheel's METADATA."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


@needs_uv
@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_its_sources_and_bounds_its_siblings(package: str, wheels: Path) -> None:
    """A wheel holds every file of its package, py.typed and the licence, nothing else, and siblings between two versions."""
    with zipfile.ZipFile(next(wheels.glob(f"ostinato_{package}-*.whl"))) as wheel:
        names, metadata = set(wheel.namelist()), metadata_of(wheel)
    source = REPO / "packages" / package / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    papers = {name for name in names if ".dist-info/" in name}
    assert names - papers == files
    assert f"ostinato_{package}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in papers)
    assert metadata["Requires-Python"] == ">=3.11"
    siblings = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("ostinato-")]
    assert all(
        re.fullmatch(r"ostinato-[a-z-]+(\[[\w,]+\])?<0\.\d+,>=0\.\d+(\.\d+)?(; extra == '\w+')?", line)
        for line in siblings
    ), siblings
    assert bool(siblings) == (package in ("rollout", "agent_loop", "trainer"))


@needs_uv
@pytest.mark.slow
def test_isolation_passes_a_good_wheel_and_finds_an_undeclared_requirement(tmp_path: Path) -> None:
    """`isolate.py` fails for a package that imports what it does not declare, which the workspace's environment hides."""
    workspace = copy_workspace(tmp_path / "clone")
    for path in (workspace / "tests/tokenization").glob("test_*.py"):
        if path.name != "test_imports.py":
            path.unlink()
    command = [
        sys.executable,
        str(workspace / ".ci/isolate.py"),
        "--scratch",
        str(tmp_path / "isolated"),
        "tokenization",
    ]
    environment = {**os.environ, "UV": str(UV)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert not (tmp_path / "isolated/tokenization").exists()

    (workspace / "packages/tokenization/src/ostinato_tokenization/careless.py").write_text("import jsonschema\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1
    assert "No module named 'jsonschema'" in done.stderr
    assert "failed alone: tokenization" in done.stdout


def foreign_project(folder: Path) -> Path:
    """A project that has nothing to do with the workspace."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "foreign"\nversion = "1"\nrequires-python = ">=3.11"\n')
    return folder


def locked_sources(project: Path) -> dict[str, dict]:
    """Where a project's lock takes our packages from."""
    entries = table(project / "uv.lock")["package"]
    return {entry["name"]: entry["source"] for entry in entries if entry["name"].startswith("ostinato-")}


ROLLOUT_AND_BELOW = {"ostinato-rollout", "ostinato-tokenization", "ostinato-tools", "ostinato-engines"}


@needs_uv
@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["plain", "editable"])
def test_one_package_is_added_to_a_foreign_project_by_path(editable: bool, tmp_path: Path) -> None:
    """`uv add ../ostinato/packages/rollout` brings the siblings from the same workspace, and they work."""
    workspace = copy_workspace(tmp_path / "ostinato")
    project = foreign_project(tmp_path / "foreign")
    succeed("add", *(["--editable"] if editable else []), "../ostinato/packages/rollout", cwd=project)
    sources = locked_sources(project)
    assert set(sources) == ROLLOUT_AND_BELOW
    for name, source in sources.items():
        (path,) = source.values()
        assert (project / path).resolve() == workspace / "packages" / name.removeprefix("ostinato-").replace("-", "_")
    assert int(succeed("run", "python", "-c", CONVERSE, cwd=project)) > 0


@needs_uv
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_one_package_is_added_to_a_foreign_project_by_git_subdirectory(tmp_path: Path) -> None:
    """`uv add "ostinato-rollout @ git+URL#subdirectory=packages/rollout"` brings the siblings from the same commit."""
    workspace = copy_workspace(tmp_path / "ostinato")
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    for command in (("init", "--quiet"), ("add", "--all"), (*identity, "commit", "--quiet", "-m", "all")):
        subprocess.run(["git", *command], cwd=workspace, check=True, timeout=60)
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=workspace, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    project = foreign_project(tmp_path / "foreign")
    succeed("add", f"ostinato-rollout @ git+{workspace.as_uri()}#subdirectory=packages/rollout", cwd=project)
    sources = locked_sources(project)
    assert set(sources) == ROLLOUT_AND_BELOW
    for name, source in sources.items():
        assert source["git"].endswith(f"#{commit}")
        assert f"packages%2F{name.removeprefix('ostinato-')}" in source["git"]
    assert int(succeed("run", "python", "-c", CONVERSE, cwd=project)) > 0


@needs_uv
@pytest.mark.slow
def test_one_package_is_released_without_the_others(wheels: Path, tmp_path: Path) -> None:
    """A new patch of one package goes with the wheels that the others have; the next minor is kept out by their bounds."""
    workspace = copy_workspace(tmp_path / "clone")
    offered = tmp_path / "offered"
    shutil.copytree(wheels, offered, ignore=shutil.ignore_patterns("*.tar.gz", ".gitignore"))
    for version in ("0.1.1", "0.2.0"):
        set_version(workspace, "tokenization", version)
        succeed("build", "--wheel", "--package", "ostinato-tokenization", "--out-dir", offered, cwd=workspace)
    environment = tmp_path / "venv"
    python = environment / "bin/python"
    succeed("venv", environment, cwd=tmp_path)
    install = ("pip", "install", "--python", python, "--find-links", offered)
    succeed(*install, "ostinato-rollout", cwd=tmp_path)
    listed = dict(line.split("==") for line in succeed("pip", "freeze", "--python", python, cwd=tmp_path).split())
    versions = {name: version for name, version in listed.items() if name.startswith("ostinato-")}
    assert versions == {**dict.fromkeys(ROLLOUT_AND_BELOW, "0.1.0"), "ostinato-tokenization": "0.1.1"}
    done = subprocess.run([python, "-c", CONVERSE], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 0

    refused = uv(*install, "ostinato-rollout", "ostinato-tokenization==0.2.0", cwd=tmp_path)
    assert refused.returncode != 0
    reason = " ".join(refused.stderr.split())
    assert re.search(r"ostinato-rollout\S* depends? on ostinato-tokenization\S*<0\.2", reason), reason


@needs_uv
@pytest.mark.slow
def test_a_release_changes_one_line_of_the_lock(tmp_path: Path) -> None:
    """Releasing a patch of one package touches its own entry of the lock and no other."""
    workspace = copy_workspace(tmp_path / "clone")
    before = (workspace / "uv.lock").read_text().splitlines()
    set_version(workspace, "tokenization", "0.1.1")
    succeed("lock", cwd=workspace)
    after = (workspace / "uv.lock").read_text().splitlines()
    assert len(after) == len(before)
    assert [(old, new) for old, new in zip(before, after, strict=True) if old != new] == [
        ('version = "0.1.0"', 'version = "0.1.1"')
    ]
