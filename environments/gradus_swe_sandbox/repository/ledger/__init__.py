"""A small household ledger: lines of text become entries, entries become reports."""
