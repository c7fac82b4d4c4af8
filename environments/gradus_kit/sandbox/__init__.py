"""Programs that a model wrote, run in a box; and calls of our own that may never return.

    >>> sandbox = Sandbox()
    >>> ended = await sandbox.run(python_program("print(input())", stdin="hello"))
    >>> ended.reason, ended.stdout
    (Reason.EXITED, 'hello\\n')

`Sandbox` starts every program in a fresh process, boxed by bubblewrap.
`HelperCalls` runs a trusted function on input that may make it hang or fill the memory.
"""

from __future__ import annotations

from gradus_kit.sandbox.calls import CallFailed, HelperCalls
from gradus_kit.sandbox.program import Ended, Limits, Reason, UntrustedProgram, python_program
from gradus_kit.sandbox.sandbox import Sandbox

__all__ = [
    "CallFailed",
    "Ended",
    "HelperCalls",
    "Limits",
    "UntrustedProgram",
    "Reason",
    "Sandbox",
    "python_program",
]
