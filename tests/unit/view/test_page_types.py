"""The scripts of the page as TypeScript reads them: names, members and arguments that fit."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

TSC = shutil.which("tsc")
"""Of Debian's `node-typescript`, or any of 4.8 or newer."""
_GLOBALS = Path(__file__).with_name("page_globals.d.ts")


@pytest.mark.slow
@pytest.mark.skipif(TSC is None, reason="tsc is not installed (apt install node-typescript)")
def test_the_scripts_of_the_page_fit_each_other_and_the_browser(tmp_path: Path) -> None:
    page = Path(str(files("gradus.view"))) / "page"
    scripts = [str(it) for it in (*page.glob("*.js"), *page.glob("views/*.js"))]
    flags = ["--noEmit", "--allowJs", "--checkJs", "--noUnusedLocals", "--noUnusedParameters"]
    flags += ["--target", "es2022", "--module", "es2022", "--lib", "es2022,dom,dom.iterable"]

    def check(*paths: str) -> subprocess.CompletedProcess[str]:
        command = [str(TSC), *flags, str(_GLOBALS), *paths]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    told = check(*scripts)
    assert told.returncode == 0, told.stdout
    wrong = tmp_path / "wrong.js"
    wrong.write_text("const found = document.boddy;\n")
    assert "boddy" in check(str(wrong)).stdout
