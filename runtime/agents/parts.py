"""All that there is of agents but their processes, put together."""

from __future__ import annotations

from dataclasses import dataclass
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
from runtime.authority.accounts import Accounts, accounts_of
from runtime.authority.attenuation import Authority
from runtime.authority.disk import DIRECTORIES_SIZE, Disk
from runtime.authority.identity import Identity
from runtime.authority.living import Living
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.privilege import ROOT, Privilege
from runtime.kernel.rooms import Rooms
from runtime.kernel.trash import Trash
from runtime.kernel.waitfiles import WaitFiles
from runtime.kernel.walker import Asker, Walker
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The parts, each of one subject. Other modules take the part that they need."""

    settings: Settings
    privilege: Privilege
    accounts: Accounts
    #: which agents there are, what is below them, and their sessions
    registry: Registry
    items: Items
    sessions: Sessions
    spaces: Spaces
    #: the one way in which any of that changes
    journal: Journal
    documents: Documents
    wait_files: WaitFiles
    trash: Trash
    #: who calls, what that may, and on whose account
    authority: Authority
    identity: Identity
    disk: Disk
    living: Living
    #: what can be done
    messages: Messages
    work: WorkPlane
    waiting: WaitingPlane
    tasks: TaskPlane
    ends: Ends
    removals: Removals
    births: Births
    answers: Answers

    async def run(self, walker: Walker, helpers: Asker) -> None:
        """Runs what goes on beside requests."""
        async with trio.open_nursery() as nursery:
            for each in (self.journal, self.waiting):
                nursery.start_soon(each.run)
            nursery.start_soon(self.wait_files.run, helpers)
            nursery.start_soon(self.trash.run, walker)
            nursery.start_soon(self.disk.run, walker)
            nursery.start_soon(self.removals.run)
            nursery.start_soon(self.answers.run)


def open_agents(
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
) -> Agents:
    """Whatever the store has; ``state`` is the state directory, ``rooms`` that of ``Rooms``,
    ``mount`` where programs see the filesystem, ``fuse`` where it really is, if elsewhere,
    ``tree`` where views have durable trees."""
    settings, accounts = Settings(config), accounts_of(config)
    trash = Trash(state / "trash")
    registry, items = Registry(store), Items()
    for item in store.load_items():
        items.add(item)
    sessions = Sessions(store=store, registry=registry, trash=trash, state=state)
    journal = Journal(
        store=store,
        history=History(state),
        registry=registry,
        items=items,
        sessions=sessions,
        state=state,
    )
    documents = Documents(journal=journal, trash=trash, state=state)
    places = TreePlaces(str(tree), tuple({str(mount), str(fuse or mount)}))
    authority = Authority(registry, settings, spaces, places)
    identity = Identity(
        registry=registry, authority=authority, hierarchy=hierarchy, privilege=privilege
    )
    disk = Disk(
        accounts, state, Rooms(rooms), spaces, store.holders, store.held_sizes, identity.payer
    )
    documents.made = sessions.made = lambda owner: disk.note(owner, DIRECTORIES_SIZE)
    living = Living(
        registry=registry,
        items=items,
        journal=journal,
        accounts=accounts,
        disk=disk,
        payer=identity.payer,
    )
    around = Around(
        settings=settings,
        registry=registry,
        items=items,
        journal=journal,
        identity=identity,
        authority=authority,
        mount=mount,
    )
    messages = Messages(around, Reports(around))
    work = WorkPlane(around)
    results = Results(
        registry=registry, sessions=sessions, documents=documents, mount=str(mount)
    )
    waiting = WaitingPlane(
        around, authority=authority, messages=messages, work=work, results=results
    )
    tasks = TaskPlane(
        around,
        authority=authority,
        living=living,
        documents=documents,
        results=results,
        messages=messages,
        waiting=waiting,
        wait_files=wait_files,
        trash=trash,
    )
    ends = Ends(
        registry=registry, messages=messages, tasks=tasks, waiting=waiting, results=results
    )
    removals = Removals(
        around,
        store=store,
        sessions=sessions,
        documents=documents,
        disk=disk,
        wait_files=wait_files,
        trash=trash,
        tasks=tasks,
        ends=ends,
    )
    births = Births(
        around,
        store=store,
        sessions=sessions,
        documents=documents,
        wait_files=wait_files,
        privilege=privilege,
        messages=messages,
        tasks=tasks,
        ends=ends,
        removals=removals,
    )
    answers = Answers(
        store=store,
        registry=registry,
        journal=journal,
        identity=identity,
        accounts=accounts,
        disk=disk,
    )
    return Agents(
        settings=settings,
        privilege=privilege,
        accounts=accounts,
        registry=registry,
        items=items,
        sessions=sessions,
        spaces=spaces,
        journal=journal,
        documents=documents,
        wait_files=wait_files,
        trash=trash,
        authority=authority,
        identity=identity,
        disk=disk,
        living=living,
        messages=messages,
        work=work,
        waiting=waiting,
        tasks=tasks,
        ends=ends,
        removals=removals,
        births=births,
        answers=answers,
    )
