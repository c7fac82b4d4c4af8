"""The processes of a run: starting and ending them, and noticing when one is silent or gone."""
