"""The options that `gradus check` knows are those that the classes take."""

from __future__ import annotations

import inspect

import pytest

from gradus.config.plugin_options import CURRICULUM_OPTIONS, FILTER_OPTIONS, Options
from gradus.orchestrator.groups.filters import FILTERS
from gradus.orchestrator.play.curriculum import CURRICULA

KINDS = [(CURRICULUM_OPTIONS, CURRICULA), (FILTER_OPTIONS, FILTERS)]
CASES = [(table[name], kinds[name]) for table, kinds in KINDS for name in sorted(table)]


@pytest.mark.parametrize(("table", "kind"), CASES)
def test_the_table_names_what_the_class_takes(table: Options, kind: type) -> None:
    taken = inspect.signature(kind).parameters
    own = {key: taken[key].default for key in taken if key not in ("num_tasks", "seed")}
    assert set(table) == set(own)
    for key, default in own.items():
        assert table[key].default == (None if default is inspect.Parameter.empty else default)
