"""Jobs for an agent with a shell: look through files in a container and write the answer down."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["GeneralAgentHarness", "GeneralAgentTaskset"]
__getattr__ = on_first_use(__name__, taskset=["GeneralAgentHarness", "GeneralAgentTaskset"])
