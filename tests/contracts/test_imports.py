"""What importing a package may load, who may import whom, and where devices are named."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer")
LEAVES = ("tokenization", "tools", "engines")
HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "numpy.f2py")


def sources(package: str) -> list[Path]:
    """The package's modules."""
    return sorted((REPO / f"packages/{package}/src/ostinato_{package}").rglob("*.py"))


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("package", ["tokenization", "tools", "engines", "rollout", "agent_loop"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """Only the trainer and engine adapters need torch, and nobody loads Ray or an engine by being imported."""
    loaded = run_python(f"import sys, ostinato_{package}; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_decorating_a_tool_loads_nothing_heavy() -> None:
    """A function tool finds its schema when it is first needed, not when the file that defines it is imported."""
    code = (
        "import sys\n"
        "from ostinato_tools import function_tool\n"
        "@function_tool\n"
        "def add(a: int, b: int) -> str:\n"
        "    '''Add.\n\n    Args:\n        a: One.\n        b: Other.\n    '''\n"
        "    return str(a + b)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert run_python(code).strip() == "[]"


def test_config_command_loads_no_torch() -> None:
    """`ostinato config` answers quickly because it never imports torch."""
    code = (
        "import sys\nsys.argv = ['ostinato', 'config', 'trainer.seed']\n"
        "from ostinato_trainer.cli import run_reporting_errors, app\n"
        "status = run_reporting_errors(lambda: app(standalone_mode=False))\n"
        "assert status == 0, status\nprint('torch' in sys.modules)\n"
    )
    lines = run_python(code).splitlines()
    assert lines[-1] == "False"
    assert any("trainer.seed" in line for line in lines)


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_device_package_names_devices(package: str) -> None:
    """cuda, npu and mps are written in one package of the project, so that another device is added in one place."""
    device_name = re.compile(r"\b(cuda|npu|mps)\b")
    for path in sources(package):
        if path.parent == REPO / "packages/engines/src/ostinato_engines/device":
            continue
        strings = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        documentation = {id(node.value) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)}
        found = [
            node.value
            for node in strings
            if device_name.fullmatch(node.value.split(":")[0]) and id(node) not in documentation
        ]
        assert not found, f"{path.relative_to(REPO)} names a device: {found}"
        assert not re.search(r"torch\.(cuda|npu|mps)\b", path.read_text()), (
            f"{path.relative_to(REPO)} calls a device's module"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_declares_its_siblings_with_bounds(package: str) -> None:
    """What a package imports of its siblings it requires, between a lower and an upper version."""
    imported = set()
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.split(".")[0] for name in names if name.startswith("ostinato_")}
    declared = (REPO / f"packages/{package}/pyproject.toml").read_text()
    for sibling in imported - {f"ostinato_{package}"}:
        distribution = sibling.replace("_", "-")
        assert re.search(rf'"{distribution}(\[[\w,]+\])?>=0\.\d+(\.\d+)?,<0\.\d+"', declared), (
            f"{package} must bound {distribution}"
        )
    if package in LEAVES:
        assert imported <= {f"ostinato_{package}"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_its_papers(package: str) -> None:
    """Each package has a version, a README, a changelog that names the version, and says that it is typed."""
    home = REPO / f"packages/{package}"
    version = re.search(r'^version = "(.+)"$', (home / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert version.group(1) in (home / "CHANGELOG.md").read_text()
    assert len((home / "README.md").read_text()) > 400
    assert (home / f"src/ostinato_{package}/py.typed").exists()
