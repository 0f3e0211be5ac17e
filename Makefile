# make demo and make test also do the set-up.

VENV    := .venv
PYTHON  := $(VENV)/bin/python
STAMP   := $(VENV)/.complete
NATIVE  := runtime/native
PROGRAMS := $(basename $(wildcard $(NATIVE)/*.c))
# not CFLAGS, which who packs exports for what pip compiles
NATIVE_CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Werror
# A static program of musl starts three times as fast as one of glibc, and takes a fraction of
# the memory. It has no headers of the kernel: those of the host come last, and make setup may
# install the compiler that says where.
MUSL    := musl-gcc
HEADERS  = $(addprefix -idirafter /usr/include,/ /$(shell $(CC) -print-multiarch))
MANPAGES := $(wildcard man/*.[1-8])

# where make install puts things, below DESTDIR, and the Python that will run them
PREFIX  := /usr/local
DESTDIR :=
INTERPRETER := python3
SITE    := build/site
# a file for each Python: what was built for another one is built anew
BUILT   := build/for-$(subst /,-,$(INTERPRETER))
PLACES  := --destdir '$(DESTDIR)' --prefix '$(PREFIX)' \
	$(and $(UNITDIR),--units '$(UNITDIR)') $(and $(USERUNITDIR),--user-units '$(USERUNITDIR)')

.PHONY: help setup programs build install uninstall deb demo test test-abreast test-unit \
	test-faults test-hostile test-systemd test-vm test-upgrade test-load test-clients test-proxy test-web \
	test-mcp test-nodes soak fuzz mutate lint bench chart man words schema clean

help:
	@echo "make setup   create .venv with ctxd and ctx; install missing packages"
	@echo "make build   make what make install copies (INTERPRETER=python3); no root, if nothing is missing"
	@echo "make install install ctxfs (PREFIX=/usr/local, DESTDIR=); make uninstall removes it"
	@echo "make deb     make a package for this release of Debian, build/ctxfs_*.deb, and check it"
	@echo "make demo    run a parent agent and its children on this checkout"
	@echo "make test    run lint, type checks and tests"
	@echo "make test-faults   kill the daemon at more points"
	@echo "make test-hostile  run all attacks, with bystanders at work (ROOTLESS=1: on a user's ctxd)"
	@echo "make test-systemd  test the units in a container that boots systemd"
	@echo "make test-vm       test limits, a power cut, and two machines with a link, all emulated"
	@echo "make test-upgrade  take over the state and agents of an older version (OLD=COMMIT)"
	@echo "make test-load     run many well-behaved users (SECONDS=300)"
	@echo "make test-clients  have Claude Code, Codex and Gemini CLI be agents (installs 1.2 GB from npm)"
	@echo "make test-proxy    test the proxy that adds keys, and events from outside (contrib/proxy, webhook)"
	@echo "make test-web      test the proxy that reaches the hosts of lists (contrib/web)"
	@echo "make test-nodes    test links to other machines: by ssh between networks, by Slurm, cut and slow"
	@echo "make test-mcp      speak to ctx mcp with the client of the protocol's SDK"
	@echo "make mutate        list small faults in the source that no test finds (NUMBER=60, SEED=1)"
	@echo "make soak          start and kill agents and daemons at random (SECONDS=3600, SEED=1)"
	@echo "make fuzz          run every parser on arbitrary input (SECONDS=3600)"
	@echo "make bench   measure speed relative to named references (JSON=FILE)"
	@echo "make chart   draw bench.svg from bench.json (JSON=FILE, SVG=FILE)"
	@echo "make man     regenerate the tables of the man pages"
	@echo "make words   regenerate the client's copy of the runtime's words"
	@echo "make schema  regenerate the schema of files that declare agents"
	@echo "make clean   remove everything that make created"

setup: $(STAMP)

# Installs missing Debian packages as root; names them for other users.
$(STAMP): pyproject.toml setup.py contrib/packages.sh $(wildcard $(NATIVE)/*.[ch])
	sh contrib/packages.sh
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

programs: $(PROGRAMS)

$(NATIVE)/%: $(NATIVE)/%.c $(wildcard $(NATIVE)/*.h)
	$(MUSL) $(NATIVE_CFLAGS) $(HEADERS) -static -o $@ $<

# ctxfs and the packages that it needs, for one Python. As root, make install copies it and no more.
build: $(BUILT)
$(BUILT): pyproject.toml setup.py contrib/packages.sh $(wildcard $(NATIVE)/*.[ch]) \
		$(shell find client ctxfs runtime -name '*.py' -o -name '*.sh' -o -name py.typed)
	sh contrib/packages.sh build
	rm -rf build
	$(INTERPRETER) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir \
		--target $(SITE) '.[top]'
	find $(SITE) \( -name __pycache__ -o -name direct_url.json \) -prune -exec rm -rf {} +
	touch $@

install: build
	@build/venv/bin/python contrib/install.py install $(PLACES) --site $(SITE) \
		--interpreter "$$(build/venv/bin/python -c 'import sys; print(sys._base_executable)')"

uninstall:
	@$(INTERPRETER) contrib/install.py uninstall $(PLACES)

deb:
	sh tests/systemd/packages.sh dpkg-buildpackage:dpkg-dev lintian:lintian
	dpkg-checkbuilddeps 2>/dev/null || apt-get build-dep -y -qq --no-install-recommends . >/dev/null
	rm -f build/ctxfs_*.deb
	debian/rules clean
	DEB_RULES_REQUIRES_ROOT=no debian/rules binary
	lintian --fail-on error,warning build/ctxfs_*.deb

demo: $(STAMP) $(PROGRAMS)
	sh contrib/demo.sh

# Most tests wait for processes, so use two workers per processor.
WORKERS := $(shell expr `nproc` \* 2)

# Lint has what the tests leave of the processors. Tests that measure how long others wait run alone.
test: $(STAMP) $(PROGRAMS)
	$(MAKE) --no-print-directory -j 2 lint test-abreast
	$(PYTHON) -m pytest -m "not long and alone" $(or $(TESTS),tests/mount tests/system)

# Collecting before compiles the tests once, rather than in each worker at the same time.
test-abreast: $(STAMP) $(PROGRAMS)
	@$(PYTHON) -m pytest --collect-only -q > /dev/null 2>&1 || true
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal -m "not long and not alone" $(TESTS)

mutate: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.mutate --number $(or $(NUMBER),60) --seed $(or $(SEED),1) $(TESTS)

test-unit: $(STAMP)
	$(PYTHON) -m pytest tests/unit tests/adapter

test-faults: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m pytest -m long tests/unit tests/adapter tests/system

test-hostile: $(STAMP) $(PROGRAMS)
	CTXFS_TEST_BYSTANDERS=1 $(PYTHON) -m $(if $(ROOTLESS),tests.rootless,pytest) \
		-m "long or not long" tests/system/test_hostile*.py \
		tests/system/test_next_lives.py tests/system/test_sources.py

test-systemd: $(STAMP) $(PROGRAMS) deb
	sh tests/systemd/packages.sh systemd-nspawn:systemd-container \
		/lib/systemd/system/dbus.socket:dbus nginx:nginx-light curl:curl adduser:adduser \
		webhook:webhook openssl:openssl squid:squid nft:nftables \
		/usr/lib/python3/dist-packages/psutil:python3-psutil \
		/usr/lib/python3/dist-packages/yaml:python3-yaml
	$(PYTHON) -m tests.systemd

test-vm: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh qemu-system-x86_64:qemu-system-x86 debootstrap:debootstrap \
		mke2fs:e2fsprogs
	$(PYTHON) -m tests.vm

test-upgrade: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.upgrade "$(OLD)"

test-load: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.soak.load $(or $(SECONDS),300)

test-clients: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh node:nodejs npm:npm nginx:nginx-light openssl:openssl
	$(PYTHON) -m tests.clients $(TESTS)

test-proxy: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh nginx:nginx-light openssl:openssl curl:curl webhook:webhook
	$(PYTHON) -m pytest tests/system/test_proxy.py tests/system/test_metered_proxy.py \
		tests/system/test_webhook.py

test-web: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh squid:squid nft:nftables ip:iproute2 openssl:openssl curl:curl \
		git:git npm:npm /lib/systemd/systemd-socket-proxyd:systemd \
		/usr/lib/python3/dist-packages/pip:python3-pip
	$(PYTHON) -m pytest -rs tests/system/test_web.py

test-mcp: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[mcp]'
	$(PYTHON) -m pytest -m "long or not long" tests/system/test_mcp_sdk.py tests/system/test_mcp.py

# two workers for each processor, since most tests wait until a lease is over
test-nodes: $(STAMP) $(PROGRAMS)
	sh tests/systemd/packages.sh sshd:openssh-server ssh:openssh-client ip:iproute2 \
		slurmd:slurmd slurmctld:slurmctld srun:slurm-client munged:munge
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadscope -m long -rs $(or $(TESTS),tests/nodes)

soak: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m tests.soak $(or $(SECONDS),3600) $(or $(SEED),1)

# with atheris, if it can be installed, coverage guides the fuzzing
fuzz: $(STAMP)
	-$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(PYTHON) -m tests.fuzz $(or $(SECONDS),3600)

lint: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	@if command -v mandoc >/dev/null; then mandoc -T lint -W warning $(MANPAGES); \
	else echo "mandoc is missing: the man pages were not checked (apt-get install mandoc)"; exit 1; fi
	set -e; for scripts in look "make tree copy" "apart make send" "bounded apart again send" "tree lacks" discard gather "bounded take judge" "bounded receive" "bounded apart unpack" "bounded apart keep judge"; do \
		for script in say $$scripts; do cat runtime/agents/worktree/$$script.sh; done | shellcheck -s sh -; \
	done

bench: $(STAMP) $(PROGRAMS)
	$(PYTHON) -m bench --json $(or $(JSON),bench.json)

chart: $(STAMP)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[chart]'
	$(PYTHON) -m bench.chart $(or $(JSON),bench.json) $(or $(SVG),bench.svg)

man: $(STAMP)
	$(PYTHON) -m contrib.generate.manual man

words: $(STAMP)
	$(PYTHON) -m contrib.generate.words client/words.py

schema: $(STAMP)
	$(PYTHON) -m ctxfs.daemon --print-schema > contrib/ctxfs-agent.schema.json

clean:
	rm -rf $(VENV) .clients build *.egg-info $(PROGRAMS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
