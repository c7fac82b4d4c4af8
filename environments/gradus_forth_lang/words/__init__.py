"""The words that Python does, by chapter; those written in Forth are in `prelude.fs`."""
