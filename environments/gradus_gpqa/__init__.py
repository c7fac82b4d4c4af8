"""Multiple-choice items for three task sets: `gpqa-rlvr`, `gpqa-debate` and `gpqa-consultancy`.

Its modules `items`, `numbers` and `reasoning` can be imported without verifiers; `tasks` holds
what the three task sets share.
"""
