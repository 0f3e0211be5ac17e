# make demo and make test do everything, set-up included.

VENV    := .venv
PYTHON  := $(VENV)/bin/python
STAMP   := $(VENV)/.complete
NATIVE  := runtime/native
PROGRAMS := $(addprefix $(NATIVE)/,binder enter gather guard keeper launcher look monitor stage view)
CFLAGS  := -std=gnu11 -O2 -Wall -Wextra -Werror
MANPAGES := $(wildcard man/*.[1-8])

.PHONY: help setup programs demo test test-unit test-faults test-hostile test-systemd test-vm \
	test-upgrade test-load soak fuzz mutate lint bench man words clean

help:
	@echo "make setup   make .venv with ctxd and ctx, installing what is missing"
	@echo "make demo    run a parent agent and its children on this checkout"
	@echo "make test    lint, types and all tests"
	@echo "make test-faults   more instants in which the daemon dies"
	@echo "make test-hostile  the whole adversarial suite, with others at work beside it"
	@echo "make test-systemd  the units in a container that boots systemd"
	@echo "make test-vm       limits and a power cut in an emulated machine"
	@echo "make test-upgrade  what an earlier version began goes on (OLD=COMMIT)"
	@echo "make test-load     many at work without malice (SECONDS=300)"
	@echo "make mutate        which small faults in the source no test sees (NUMBER=60, SEED=1)"
	@echo "make soak          random lives and deaths by a seed (SECONDS=3600, SEED=1)"
	@echo "make fuzz          every parser on made-up input (SECONDS=3600)"
	@echo "make bench   ratios of speed to named references"
	@echo "make man     write the generated tables of the man pages anew"
	@echo "make words   write the words that the client knows of the runtime anew"
	@echo "make clean   remove what the others made"

setup: $(STAMP)

# Debian packages: named if missing, installed if this is root.
$(STAMP): pyproject.toml setup.py contrib/packages.sh $(wildcard $(NATIVE)/*.[ch])
	sh contrib/packages.sh
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

programs: $(PROGRAMS)

$(NATIVE)/%: $(NATIVE)/%.c $(wildcard $(NATIVE)/*.h)
	$(CC) $(CFLAGS) -static -o $@ $<

demo: $(STAMP) $(PROGRAMS)
	sh contrib/demo.sh

# Most tests wait for processes: half as many again as there are processors keep those at work.
WORKERS := $(shell expr `nproc` \* 3 / 2)

# what measures how long others are held up has the machine for itself
test: lint
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal -m "not long and not alone" $(TESTS)
	$(PYTHON) -m pytest -m "not long and alone" $(TESTS)

mutate: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.mutate --number $(or $(NUMBER),60) --seed $(or $(SEED),1) $(TESTS)

test-unit: $(STAMP)
	$(PYTHON) -m pytest tests/unit tests/adapter

test-faults: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m pytest -m long tests/system

test-hostile: $(STAMP) $(PROGRAMS)
	CTXFS_TEST_BYSTANDERS=1 $(PYTHON) -m pytest -m "long or not long" tests/system/test_hostile*.py \
		tests/system/test_next_lives.py tests/system/test_sources.py

test-systemd: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh systemd-nspawn:systemd-container \
		/lib/systemd/system/dbus.socket:dbus
	$(PYTHON) -m tests.systemd

test-vm: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh qemu-system-x86_64:qemu-system-x86 debootstrap:debootstrap \
		mke2fs:e2fsprogs
	$(PYTHON) -m tests.vm

test-upgrade: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.upgrade "$(OLD)"

test-load: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.soak.load $(or $(SECONDS),300)

soak: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.soak $(or $(SECONDS),3600) $(or $(SEED),1)

# atheris if it can be had: guided by what of the code was reached
fuzz: $(STAMP)
	-$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(PYTHON) -m tests.fuzz $(or $(SECONDS),3600)

lint: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	@if command -v mandoc >/dev/null; then mandoc -T lint -W warning $(MANPAGES); \
	else echo "mandoc is missing: the man pages were not checked (apt-get install mandoc)"; exit 1; fi

bench: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m bench

man: $(STAMP)
	$(PYTHON) -m ctxfs.manual man/ctxfs.5

words: $(STAMP)
	$(PYTHON) -m ctxfs.words client/words.py

clean:
	rm -rf $(VENV) build *.egg-info $(PROGRAMS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
