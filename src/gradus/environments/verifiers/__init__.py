"""Everything that gradus changes in verifiers and its libraries; `table` lists and installs it."""
