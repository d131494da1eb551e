"""READMEs, pages and recipes: the keys that they name exist, and their configurations load."""

import re
from pathlib import Path

import pytest

from ostinato_trainer.config import Config
from ostinato_trainer.config.docs import config_rows
from ostinato_trainer.config.loading import load_config
from ostinato_trainer.config.schema import schema_sections
from ostinato_trainer.config.sft import SftConfig

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    REPO / "README.md",
    *(REPO / "packages" / name / "README.md" for name in ("trainer", "agent_loop")),
    *sorted((REPO / "docs").glob("*.md")),
    *sorted((REPO / "recipes").rglob("*.yaml")),
]
TRAINER = (REPO / "packages" / "trainer" / "README.md").read_text()
KEY = re.compile(
    r"(?<![\w./-])(?:actor_rollout_ref|algorithm|critic|data|reward|trainer|ray_kwargs|rollout|agent|multi_turn|gateway)"
    r"(?:\.(?!py\b)[a-z_0-9]+)+(?![\w/*{(.])"
)
"""A key as pages write it, whole or from one of its last sections on."""


ROWS = [*config_rows(Config), *config_rows(SftConfig)]
KNOWN = {*(row.key for row in ROWS), *schema_sections(Config), *schema_sections(SftConfig)}
MAPPINGS = tuple(f"{row.key}." for row in ROWS if row.type == "mapping")


def exists(key: str) -> bool:
    """Whether it is a key or section, whole or without its first sections, or lies in a mapping that is free."""
    return key in KNOWN or key.startswith(MAPPINGS) or any(known.endswith(f".{key}") for known in KNOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_the_keys_that_it_names_exist(page: Path) -> None:
    """No page tells to write a key that a run would refuse."""
    assert [key for key in KEY.findall(page.read_text(encoding="utf-8")) if not exists(key)] == []


def test_keys_are_found_on_pages() -> None:
    """The pattern of the test above sees keys in commands, in prose and in comments, and a wrong one is noticed."""
    found = [key for page in PAGES for key in KEY.findall(page.read_text(encoding="utf-8"))]
    assert {"actor_rollout_ref.model.path", "trainer.max_staleness", "data.train_files"} <= set(found)
    assert not exists("trainer.max_stalenes")
    assert not exists("reward.combine.score.weight.of")


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", TRAINER, re.DOTALL))
def test_configurations_of_the_trainers_page_load(text: str, tmp_path: Path) -> None:
    """Every YAML block of the trainer's README is what a run reads."""
    (tmp_path / "config.yaml").write_text(text)
    load_config([tmp_path / "config.yaml"], [])


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TRAINER, re.DOTALL))
def test_python_of_the_trainers_page_runs(code: str) -> None:
    """Every Python block of the trainer's README runs as it is written, its assertions included."""
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
