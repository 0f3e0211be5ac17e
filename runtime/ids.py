"""Ids, each of a type of its own: mypy refuses the id of one thing where another's is wanted.

An id is made where it comes from: from a row of the store, a random text, a file of the kernel,
a line or a frame of a caller. Everything else passes it on. At run time it is a plain ``int`` or
``str``, so that it costs one call where it is made.
"""

from __future__ import annotations

from typing import Final, NewType

#: the row of an agent in the store: one incarnation of a name
AgentIndex = NewType("AgentIndex", int)
#: the row of a session
SessionIndex = NewType("SessionIndex", int)
#: the row of a message, task, work item, wait or ask
ItemIndex = NewType("ItemIndex", int)
#: the row of a space
SpaceIndex = NewType("SpaceIndex", int)

#: something that has no row yet
NO_AGENT: Final = AgentIndex(0)
NO_SESSION: Final = SessionIndex(0)
NO_ITEM: Final = ItemIndex(0)
NO_SPACE: Final = SpaceIndex(0)

#: a random text, which no two incarnations share; it names the directory of their files
Incarnation = NewType("Incarnation", str)
#: ``rN``: a run of a name, counted over all its incarnations; a cell that begins before any run
#: has an id of this kind too, ``cell-…``
RunId = NewType("RunId", str)
#: a boot of the machine (proc(5))
BootId = NewType("BootId", str)
#: a message of a session, named by its sender or at random
MessageId = NewType("MessageId", str)
#: a call of a tool, named by its caller
CallId = NewType("CallId", str)
#: a FIFO that blocks its readers until something ends
WaitFileName = NewType("WaitFileName", str)
#: a secret: writing to the file of this name fires a wait
TriggerToken = NewType("TriggerToken", str)

#: something that has not begun, or has none
NO_INCARNATION: Final = Incarnation("")
NO_RUN: Final = RunId("")
NO_MESSAGE: Final = MessageId("")
NO_BOOT: Final = BootId("")
NO_WAIT_FILE: Final = WaitFileName("")
