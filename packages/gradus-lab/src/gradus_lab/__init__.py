"""Proofs and trials that few runs need, behind `gradus lab`."""
