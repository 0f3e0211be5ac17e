"""Agents, their rights and their processes, without a filesystem.

Its floors, from below: the ground (errors, ids, callers), ``texts`` (parsers), ``kernel`` (Linux
only, no agents), ``records`` (what is stored; no processes), ``authority`` (who calls, what the
caller may do, whose account pays), ``agents`` (operations on records), ``cell`` (how a program
gets into a sandbox), ``life`` (everything that awaits processes), ``peers`` (other machines),
``sockets``, and the roof (``runtime.runtime``). A module imports from its own floor and from lower
ones, and none import each other in a circle. So ``kernel`` can be tested without agents and
``records`` without processes, and files, sockets and crash recovery share each rule about agents.

In the code each of these words stands for one thing:

- *agent*: one incarnation of a name, from ``mkdir`` to ``rmdir``; a reset puts a new one in its
  place
- *id*, *index*: what names one thing, by a type of its own (``runtime.ids``); the id of a row of
  the store
- *cell*: an agent's sandbox, its cgroup and namespaces, held by a keeper
- *run*: one time that an agent's program runs in its cell; its monitor writes a *run record*
- *execution*, *live cell*: one running program as the daemon knows it in memory; an agent's cell
  with all executions in it
- *port*: what those who lead programs ask of the machine on which these run (``cell.port``)
- *session*: the history of a name's conversation, in ``home/``; it outlives agents
- *record*, *item*: a row of the store; one below an agent: message, task, work item, wait, ask or
  report
- *plane*: the items of one kind below an agent, and their directory
- *report*: what an agent tells its supervisor; a message of provenance ``child``
- *provenance*: what the sender of a message is to the agent, as the runtime knows it
- *handle*: a task that stands for a child
- *change*: all that one transaction changes, said first and committed once; *subscribers* are told
  of it
- *cue*, *move*, *effect*: a verb, or what the runtime observes; the step of a status that the
  table has for it; what the step calls for beside the records
- *event*: a line of ``events.jsonl``; sockets send the same
- *ask*: an item, a question of an agent's; its *addressee* is ``operator`` or ``supervisor``
- *wait*, *wait file*: an item, what an agent waits for; a FIFO that blocks readers until an end
- *wakeup*: what rouses a task of the daemon when one of several files or causes changes
- *facts*: where guards, and the parts of ``agents``, look things up (``authority.facts``)
- *guard*: who may do a thing, when, and what stands in its way; the *mount guard* is the process
  that frees a dead mount
- *owner*, *creator*: the uid that pays for an agent; who made it, and supervises it
- *charge*: so much of one resource on an owner's account, until it is released
- *network*, *relay*: a socket of the operator's, by name; the process outside of a cell that
  copies between the two
- *metered network*: one at which the *meter* (``runtime.metering``, a program of its own) counts
  what is used of models, in an *account* of each *payer*: the agent, and all above it by lineage
- *lead*, *host*, *placed*: the daemon at which an agent is made, the one at which it runs, on
  another machine, and such an agent; a *registration* is what both keep of each other
- *node*: in ``runtime``, another machine, by the name that the configuration has for it
- *order*: what a native program is told to do
- *lane*: a line of those who wait for the same, of whom some go on (``kernel.lanes``)
- *layout*, *row*, *node*, *open file*: in ``ctxfs``, the rows of one kind of object and how it is
  found; a file as a line of a layout; that row of one object; what open(2) made of it
- *command*: in ``client``, what a user asks of ``ctx``; here, a program to run inside a cell
- *call*, *answer*: one use of a tool; what it says, kept for a call with an id
"""
