"""All that there is of agents but their processes, put together.

A module that reacts to others subscribes to them: waits to queued messages and to the ends of work
items, accounts and caches to the journal. Objects are made in the order in which they need each
other, here, in ``runtime.runtime`` and in ``ctxfs.daemon``. The sockets come last, because they
call the tools.
"""

from __future__ import annotations

from pathlib import Path

import trio

from runtime.agents.answers import Answers
from runtime.agents.births import Births
from runtime.agents.ends import Ends
from runtime.agents.messages import Messages
from runtime.agents.planes import Around
from runtime.agents.removals import Removals
from runtime.agents.reports import Reports
from runtime.agents.results import Results
from runtime.agents.tasks import TaskPlane
from runtime.agents.waiting import WaitingPlane
from runtime.agents.work import WorkPlane
from runtime.authority.accounts import accounts_of
from runtime.authority.attenuation import Authority
from runtime.authority.disk import DIRECTORIES_SIZE, Disk
from runtime.authority.identity import Identity
from runtime.authority.living import Living
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.helpers import Helpers
from runtime.kernel.privilege import ROOT, Privilege
from runtime.kernel.rooms import Rooms
from runtime.kernel.trash import Trash
from runtime.kernel.waitfiles import WaitFiles
from runtime.kernel.walker import Walker
from runtime.records.config import Config
from runtime.records.documents import Documents
from runtime.records.history import History
from runtime.records.items import Items
from runtime.records.journal import Journal
from runtime.records.registry import Registry
from runtime.records.sessions import Sessions
from runtime.records.settings import Settings
from runtime.records.spaces import Spaces
from runtime.records.store import Store
from runtime.texts.mounts import TreePlaces


class Agents:
    """The parts, each of one subject. Other modules take the part that they need."""

    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        spaces: Spaces,
        hierarchy: Hierarchy,
        wait_files: WaitFiles,
        state: Path,
        rooms: Path,
        mount: Path,
        fuse: Path | None = None,
        tree: Path = Path("/run/ctxfs/tree"),
        privilege: Privilege = ROOT,
    ) -> None:
        """Whatever the store has; ``state`` is the state directory, ``rooms`` that of ``Rooms``,
        ``mount`` where programs see the filesystem, ``fuse`` where it really is, if elsewhere,
        ``tree`` where views have durable trees."""
        self.settings = Settings(config)
        self.privilege = privilege
        self.accounts = accounts_of(config)
        self.wait_files = wait_files
        self.trash = trash = Trash(state)
        #: which agents there are, what is below them, and their sessions
        self.registry = registry = Registry(store)
        self.items = items = Items()
        for item in store.load_items():
            items.add(item)
        self.sessions = Sessions(store=store, registry=registry, trash=trash, state=state)
        self.spaces = spaces
        #: the one way in which any of that changes
        self.journal = journal = Journal(
            store=store,
            history=History(state),
            registry=registry,
            items=items,
            sessions=self.sessions,
            state=state,
        )
        self.documents = Documents(journal=journal, trash=trash, state=state)
        #: who calls, what that may, and on whose account
        places = TreePlaces(str(tree), tuple({str(mount), str(fuse or mount)}))
        self.authority = Authority(registry, self.settings, spaces, places)
        self.identity = Identity(
            registry=registry, authority=self.authority, hierarchy=hierarchy, privilege=privilege
        )
        payer = self.identity.payer
        self.disk = disk = Disk(
            self.accounts, state, Rooms(rooms), spaces, store.holders, store.held_sizes, payer
        )
        self.documents.made = self.sessions.made = lambda owner: disk.note(owner, DIRECTORIES_SIZE)
        self.living = Living(
            registry=registry,
            items=items,
            journal=journal,
            accounts=self.accounts,
            disk=disk,
            payer=payer,
        )
        around = Around(
            settings=self.settings,
            store=store,
            registry=registry,
            items=items,
            sessions=self.sessions,
            journal=journal,
            documents=self.documents,
            wait_files=wait_files,
            trash=trash,
            identity=self.identity,
            authority=self.authority,
            accounts=self.accounts,
            disk=disk,
            living=self.living,
            mount=mount,
        )
        #: what can be done
        self.messages = messages = Messages(around, Reports(around))
        self.work = work = WorkPlane(around)
        self.results = results = Results(around)
        self.waiting = waiting = WaitingPlane(
            around, messages=messages, work=work, results=results
        )
        self.tasks = tasks = TaskPlane(
            around, results=results, messages=messages, waiting=waiting
        )
        self.ends = ends = Ends(around, messages=messages, tasks=tasks, waiting=waiting)
        self.removals = removals = Removals(around, tasks, ends)
        self.births = Births(
            around,
            privilege=privilege,
            messages=messages,
            tasks=tasks,
            ends=ends,
            removals=removals,
        )
        self.answers = Answers(around)

    async def run(self, walker: Walker, helpers: Helpers) -> None:
        """Runs what goes on beside requests."""
        async with trio.open_nursery() as nursery:
            for each in (self.journal, self.waiting, self.removals, self.answers):
                nursery.start_soon(each.run)
            nursery.start_soon(self.wait_files.run, helpers)
            nursery.start_soon(self.trash.run, walker)
            nursery.start_soon(self.disk.run, walker)
