"""Every recipe passes the fast check, as it is and with its small overlay for two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.cli.main import main
from gradus.errors import ExitCode

REPOSITORY = Path(__file__).parents[3]
RECIPES = REPOSITORY / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def check(*words: str) -> int:
    return main(["check", "rl", "--fast", *words])


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_there_are_recipes_and_each_has_its_overlay() -> None:
    assert len(NAMES) > 2
    assert sorted(path.stem for path in (RECIPES / "small").glob("*.toml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("in_repository")
def test_a_recipe_passes_the_fast_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("@", f"examples/recipes/{name}.toml") == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("in_repository")
def test_its_overlay_makes_it_small(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["@", f"examples/recipes/{name}.toml", "@", f"examples/recipes/small/{name}.toml"]
    code = check(*files, "--model.name", "someone/tiny")
    told = capsys.readouterr()
    assert code == 0, told.err
    assert "run: 2 steps" in told.out


@pytest.mark.usefixtures("in_repository")
def test_what_a_machine_lacks_is_a_note_of_the_fast_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = ("@", "examples/recipes/general_agent.toml", "--trainer.parallel.compile", "true")
    assert check(*recipe) == 0
    told = capsys.readouterr().out
    assert "runtime.type: 'container'" in told
    assert "parallel.compile" in told
    assert main(["check", "rl", *recipe]) == ExitCode.CONFIG
