"""Build every package as a wheel, install it alone with only what it declares, import it and run its own tests there.

``isolate.py [PACKAGE ...] [--scratch DIR]``: each package, and each of its extras that the tests know, gets an environment of its own outside
the workspace, so that nothing but the wheel and its declared requirements can be imported. With an extra, the test modules run that skipped something
without it. An environment that passed is removed at once; with ``--scratch`` those that failed, and the wheels, are left to look at.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parent.parent
UV = os.environ.get("UV", "uv")  # `uv run` tells its children which uv it is
PACKAGES = ("tokenization", "tools", "engines", "rollout", "agent_loop", "trainer")
TESTED_EXTRAS = ("transformers", "mcp", "zmq", "serve", "ray", "mlflow", "langgraph", "gateway", "math", "lora")
TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
# One torch for every environment, as in the lock: what is tested, not what is installed, should differ.
TORCH = "torch==2.13.*"
# Run inside the environment: what is there of ours, where it lies, and that a module which cannot be imported lacks nothing but an extra.
CHECK_IMPORTS = """
import importlib, pkgutil, re, sys
from importlib.metadata import requires
from pathlib import Path
name, declared = sys.argv[1], set(sys.argv[2:])  # declared: itself and its siblings, an extra of one of which may be what it needs
package = importlib.import_module(name)
assert Path(package.__file__).is_relative_to(sys.prefix), f"{package.__file__} is not in {sys.prefix}"
assert Path(package.__file__).with_name("py.typed").is_file(), "py.typed is not in the wheel"
present = {found.name for found in pkgutil.iter_modules() if found.name.startswith("ostinato")}
assert present == declared, f"{sorted(declared)} are declared, {sorted(present)} can be imported"
needed = [line for each in declared for line in requires(each.replace("_", "-")) if "extra ==" in line]
optional = {re.split(r"[^\\w.-]", line)[0].replace("-", "_") for line in needed}
for found in pkgutil.walk_packages(package.__path__, name + "."):
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        cause = error if error.name else error.__cause__
        missing = cause.name.split(".")[0] if isinstance(cause, ImportError) and cause.name else None
        # megatron-core is imported as megatron.core
        if missing is None or not any(f"{each}_".startswith(f"{missing}_") for each in optional):
            raise
        print(f"  {found.name} needs an extra: {error}")
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command, showing it; its failure is an error."""
    print("+", *(str(part) if "\n" not in str(part) else "CODE" for part in command), flush=True)
    leaking = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in leaking}
    environment.setdefault("OSTINATO_SHARED", str(REPO.parent / "shared"))
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


def project(package: str) -> dict:
    """The package's `[project]` table."""
    return tomllib.loads((REPO / "packages" / package / "pyproject.toml").read_text())["project"]


def siblings_of(package: str) -> set[str]:
    """The packages that are installed with this one because it requires them, itself included."""
    required = {
        name for name in PACKAGES for line in project(package)["dependencies"] if line.startswith(project(name)["name"])
    }
    return {package}.union(*(siblings_of(name) for name in required))


def skipping(report: Path) -> list[str]:
    """The test modules that skipped something, by pytest's report."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is not None]
    # A module that was skipped as a whole is a case without a class, named after itself.
    return sorted({case.get("file") or f"{case.get('name', '').replace('.', '/')}.py" for case in cases})


def isolate(package: str, extra: str | None, home: Path, wheels: Path, tests: list[str]) -> list[str]:
    """Install one wheel alone in an environment below `home`, run tests from a folder that holds nothing else; return what skipped."""
    python, name = home / "venv/bin/python", project(package)["name"]
    home.mkdir(parents=True)
    # Siblings are the wheels just built, whatever an index offers under their names.
    built = {project(other)["name"]: next(wheels.glob(f"ostinato_{other}-*.whl")).as_uri() for other in PACKAGES}
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join([TORCH, *(f"{other} @ {uri}" for other, uri in built.items())]) + "\n")
    install = (UV, "pip", "install", "--quiet", "--python", python, "--constraints", constraints)
    run(UV, "venv", "--quiet", "--no-project", "--python", sys.executable, home / "venv", cwd=home)
    run(*install, f"{name}[{extra}]" if extra else name, cwd=home)
    imports = [f"ostinato_{other}" for other in sorted(siblings_of(package))]
    run(python, "-c", CHECK_IMPORTS, f"ostinato_{package}", *imports, cwd=home)
    run(*install, *TEST_REQUIREMENTS, cwd=home)
    # The tests find README and recipes where the workspace has them, but no sources.
    shutil.copytree(REPO / "tests" / package, home / "tests" / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "tests" / "conftest.py", home / "tests")
    (home / "packages" / package).mkdir(parents=True)
    shutil.copy(REPO / "packages" / package / "README.md", home / "packages" / package)
    if package == "trainer":
        shutil.copytree(REPO / "recipes", home / "recipes")
    options = ("-q", "-c", REPO / "pyproject.toml", "--rootdir", home, "--confcutdir", home, "-p", "no:cacheprovider")
    report = home / "report.xml"
    run(python, "-m", "pytest", *options, "-o", "junit_family=xunit1", f"--junit-xml={report}", *tests, cwd=home)
    return skipping(report)


def main() -> int:
    """Build all wheels, isolate the named packages, or all, with and without their extras; the status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("packages", nargs="*", default=[], help=f"of {', '.join(PACKAGES)}; all where none is named")
    parser.add_argument("--scratch", type=Path, help="a folder for wheels and environments; a temporary one by default")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.packages) - set(PACKAGES))
    if unknown:
        parser.error(f"packages must be of {', '.join(PACKAGES)}, got {', '.join(unknown)}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="ostinato-isolate-") as temporary:
        scratch = (arguments.scratch or Path(temporary)).resolve()
        wheels = scratch / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        run(UV, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels, cwd=REPO)
        for package in arguments.packages or PACKAGES:
            extras = [extra for extra in TESTED_EXTRAS if extra in project(package).get("optional-dependencies", {})]
            tests = [f"tests/{package}"]
            for extra in (None, *extras):
                label = f"{package}[{extra}]" if extra else package
                home = scratch / label
                shutil.rmtree(home, ignore_errors=True)
                print(f"\n== {label}", flush=True)
                try:
                    skipped = isolate(package, extra, home, wheels, tests)
                except subprocess.CalledProcessError as error:
                    print(f"{label} failed with status {error.returncode}", flush=True)
                    failed.append(label)
                else:
                    shutil.rmtree(home)
                    if extra is None:
                        tests = skipped or tests
    print(f"\nfailed alone: {', '.join(failed)}" if failed else "\nevery wheel passed its tests alone")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
