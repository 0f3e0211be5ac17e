"""All that is known of agents: their records, their rights, and what is charged for them."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from pathlib import Path

from runtime.authority.accounts import accounts_of
from runtime.authority.attenuation import Authority
from runtime.authority.disk import DIRECTORIES_SIZE, Disk
from runtime.authority.identity import Identity
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.privilege import ROOT, Privilege
from runtime.kernel.rooms import Rooms
from runtime.kernel.trash import Trash
from runtime.kernel.waitfiles import WaitFiles
from runtime.records.config import Config
from runtime.records.documents import Documents
from runtime.records.fleet import Fleet
from runtime.records.history import History
from runtime.records.itemlists import Items
from runtime.records.journal import Journal
from runtime.records.registry import Registry
from runtime.records.sessions import Sessions
from runtime.records.settings import Settings
from runtime.records.spaces import Spaces
from runtime.records.store import Store
from runtime.texts.mounts import TreePlaces


@dataclass(kw_only=True, eq=False)
class Facts:
    """The places in which guards, and all parts of ``runtime.agents``, look things up.

    Objects are made in the order in which they need each other, of whatever the store has.
    """

    config: InitVar[Config]
    store: Store
    spaces: Spaces
    hierarchy: Hierarchy
    wait_files: WaitFiles
    state: Path
    #: of ``Rooms``
    rooms: Path
    #: where programs see the filesystem, where it really is, if elsewhere, and where views have
    #: durable trees
    mount: Path
    fuse: Path | None = None
    tree: Path = Path("/run/ctxfs/tree")
    privilege: Privilege = ROOT

    def __post_init__(self, config: Config) -> None:
        store, state = self.store, self.state
        self.settings = Settings(config)
        self.accounts = accounts_of(config)
        self.trash = trash = Trash(state)
        #: which agents there are, what is below them, and their sessions
        self.registry = registry = Registry(store)
        self.items = items = Items()
        for item in store.load_items():
            items.add(item)
        self.sessions = Sessions(store=store, registry=registry, trash=trash, state=state)
        #: what happened
        history = History(state)
        self.fleet = Fleet(state, history, self.settings)
        #: the one way in which any of that changes
        self.journal = Journal(
            store=store,
            registry=registry,
            items=items,
            sessions=self.sessions,
            history=history,
            fleet=self.fleet,
            state=state,
        )
        self.documents = Documents(journal=self.journal, trash=trash, state=state)
        #: who calls, what that may, and on whose account
        roots = tuple({str(self.mount), str(self.fuse or self.mount)})
        places = TreePlaces(str(self.tree), roots)
        self.authority = Authority(registry, self.settings, self.spaces, places)
        self.identity = Identity(
            registry=registry,
            authority=self.authority,
            hierarchy=self.hierarchy,
            privilege=self.privilege,
        )
        self.disk = disk = Disk(
            self.accounts,
            state,
            Rooms(self.rooms),
            self.spaces,
            store.holders,
            store.held_sizes,
            self.identity.payer,
        )
        self.documents.made = self.sessions.made = lambda owner: disk.note(owner, DIRECTORIES_SIZE)


class Part:
    """A subject of its own, with what it looks things up in."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._settings = facts.settings
        self._store = facts.store
        self._registry = facts.registry
        self._items = facts.items
        self._sessions = facts.sessions
        self._journal = facts.journal
        self._documents = facts.documents
        self._wait_files = facts.wait_files
        self._trash = facts.trash
        self._identity = facts.identity
        self._authority = facts.authority
        self._accounts = facts.accounts
        self._disk = facts.disk
