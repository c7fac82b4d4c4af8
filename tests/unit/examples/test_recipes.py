"""Every recipe passes the fast check, as it is and with its small overlay for two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.cli.main import main

REPOSITORY = Path(__file__).parents[3]
RECIPES = REPOSITORY / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def check(*words: str) -> int:
    return main(["check", "rl", "--level", "config", *words])


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_there_are_recipes_and_each_has_its_overlay() -> None:
    assert len(NAMES) > 2
    assert sorted(path.stem for path in (RECIPES / "small").glob("*.toml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("in_repository")
def test_a_recipe_passes_the_fast_check(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of them shares its engine over eight GPUs, which a test machine has not.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    assert check("@", f"examples/recipes/{name}.toml") == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("in_repository")
def test_its_overlay_makes_it_small(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["@", f"examples/recipes/{name}.toml", "@", f"examples/recipes/small/{name}.toml"]
    code = check(*files, "--model.name", "someone/tiny")
    told = capsys.readouterr()
    assert code == 0, told.err
    assert "run: 2 steps" in told.out
