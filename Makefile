# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# What people type. What kbuild builds is in Kbuild; how the machine is set up is in tools/setup.
# `make help` lists the targets.

MAKEFLAGS += --no-print-directory --no-builtin-rules

# Every step uses all processors by itself.
.NOTPARALLEL:

ifneq ($(KDIR),)
# The usual convention: build against a kernel tree with Rust metadata, with this machine's compilers.
kdir_default := module
endif

.DEFAULT_GOAL := $(or $(kdir_default),modules-stock)

setup := tools/setup/setup
module := tools/setup/build-module
in-root := tools/setup/in-root
cargo := $(in-root) env CARGO_TARGET_DIR=$(CURDIR)/build/tools CARGO_TERM_PROGRESS_WHEN=never cargo
in-guests = set -a && eval "$$(tools/setup/env)" && exec $(in-root)
vm = $(in-guests) build/tools/release/vbrs-vm
kbuild = $(MAKE) -C $(or $(KDIR),$(error KDIR=/path/to/kernel/build is needed)) M=$(CURDIR) MO=$(CURDIR)/build/kdir
manifest := --manifest-path tools/Cargo.toml
GUEST ?= uml

##@ Module

.PHONY: module
module: ## build build/kdir/virtio-balloon-rs.ko for any tree with Rust metadata (what `make KDIR=/path` does)
	@test -e '$(KDIR)/Makefile' || { echo "KDIR=$(KDIR): no kernel build tree there" >&2; exit 2; }
	@test -e '$(KDIR)/rust/libkernel.rmeta' || { \
		echo "KDIR=$(KDIR): a kernel build tree without Rust metadata (rust/libkernel.rmeta)" >&2; exit 2; }
	@for tool in $(or $(RUSTC),rustc) $(or $(BINDGEN),bindgen); do command -v $$tool >/dev/null || { \
		echo "KDIR=$(KDIR): there is no $$tool on this machine; the one that built the kernel is needed" >&2; exit 2; }; done
	@mkdir -p build/kdir
	@$(kbuild) modules

.PHONY: modules_install install
modules_install: ## install that module (INSTALL_MOD_PATH works as usual): make modules_install KDIR=/path
	@$(kbuild) modules_install
install: modules_install ## the same

.PHONY: modules-stock modules-uml modules-uml-lean modules-debug
modules-stock: ## build build/stock/virtio-balloon-rs.ko for Debian's stock kernel (what `make` does)
	@$(setup) kernel
	@$(module) stock
modules-uml: ## build it for User Mode Linux with lock checking
	@$(setup) uml
	@$(module) uml
modules-uml-lean: ## build it for User Mode Linux without any checking
	@$(setup) uml-lean
	@$(module) uml-lean
modules-debug: ## build it for the x86 kernel with all checks
	@$(setup) debug
	@$(module) debug

# Those that tests run in, all at a time: most of building one is a single process.
.PHONY: modules-tests
modules-tests:
	@$(setup) tests
	@builds=; for guest in stock uml debug; do $(module) $$guest & builds="$$builds $$!"; done; \
	for build in $$builds; do wait $$build || failed=1; done; exit $${failed:-0}

modules-%:
	@echo "there is no guest '$*'; there are: stock, uml, uml-lean, debug" >&2; exit 2

##@ Host

.PHONY: tools
tools: ## build the host daemon, balloonctl and the test runner into build/tools/release
	@$(setup) root
	@tools/setup/build-tools

# What guests are run with, without the bench.
.PHONY: guest-tools
guest-tools:
	@$(setup) root
	@# By binaries of the whole workspace, so that what is compiled fits `tools` as well.
	@tools/setup/build-tools --workspace --bin vbrs-vm --bin vbrs-guest --bin vhost-device-balloon --bin balloonctl

.PHONY: test-host
test-host: ## run the tests that need no guest
	@$(setup) root
	@tools/setup/crates restore
	@$(cargo) test $(manifest) --workspace --release --locked --quiet

##@ Guests

.PHONY: demo
demo: modules-stock guest-tools ## show a stock guest giving 3 of its 4 GiB back to the host
	@$(vm) demo $(ARGS)

.PHONY: shell
shell: modules-$(GUEST) guest-tools ## an interactive guest with module and daemon: GUEST=uml|uml-lean|stock|debug
	@$(vm) shell --guest $(GUEST) $(ARGS)

.PHONY: bench
bench: modules-stock modules-uml-lean tools ## measure speed against the C driver: all cases, or CASE=name
	@$(in-guests) build/tools/release/vbrs-bench $(CASE) $(ARGS)

.PHONY: bench-smoke
bench-smoke: modules-uml tools ## a minute of bench, to see that it works
	@$(in-guests) build/tools/release/vbrs-bench --smoke

##@ Checks

# A step of `check` whose result `vbrs-vm check --all` adds up in the end: its name, and the command.
step = ($(vm) record --name $(1) -- $(2))
# The same, beside others: what it says comes in one piece when it is done.
beside = (said=$$(mktemp) && $(call step,$(1),$(2)) >"$$said" 2>&1; cat "$$said"; rm "$$said") &

.PHONY: check
check: modules-tests tools ## everything: lint, host tests, all guests
	@rm -rf build/results
	@# Most of what a guest takes is waiting; what is compiled meanwhile uses the processors.
	@$(call beside,parity,build/tools/release/vbrs-vm parity --short) \
	$(call step,lint-scripts,make lint-scripts); \
	$(call step,lint-format,make lint-format); \
	$(call step,lint-module,make lint-module); \
	$(call step,lint-tools,make lint-tools); \
	wait
	@$(call beside,bench-smoke,build/tools/release/vbrs-bench --smoke) \
	$(call step,libvirt,build/tools/release/vbrs-vm libvirt); \
	$(call step,test-host,make test-host); \
	wait
	@tools/setup/crates save
	@$(vm) check --all $(ARGS)

.PHONY: parity
parity: modules-tests guest-tools ## the C driver and this one side by side, into Documentation/parity.rst
	@$(vm) parity --write Documentation/parity.rst $(ARGS)

.PHONY: test-libvirt
test-libvirt: modules-stock guest-tools ## start the libvirt sample and steer its balloon with virsh
	@$(vm) libvirt $(ARGS)

.PHONY: breaks
breaks: modules-tests guest-tools ## break the driver on purpose, and see that tests notice: all ways, or BREAK=part-of-a-name
	@tools/breaks/run $(BREAK)

.PHONY: lint
lint: lint-scripts lint-format lint-module lint-tools ## formatting and lints of module, tools and scripts

.PHONY: lint-scripts lint-format lint-module lint-tools
lint-scripts:
	@$(setup) root
	@echo '  LINT    scripts'
	@$(in-root) shellcheck -x $$(grep -rlIE '^#!/bin/(ba)?sh|^# shellcheck shell=' --exclude-dir=build --exclude-dir=.git .)
lint-format:
	@$(setup) kernel
	@echo '  LINT    format'
	@eval "$$(tools/setup/env)" && exec $(in-root) rustfmt --check --edition 2021 \
		--config-path "$$VBRS_KERNEL_SOURCE/.rustfmt.toml" \
		$$(find . -name '*.rs' ! -name '*_generated.rs' ! -path './tools/*' ! -path './build/*')
	@$(cargo) fmt $(manifest) --all --check
lint-module:
	@$(setup) kernel
	@echo '  LINT    module'
	@$(module) stock --lint
lint-tools:
	@$(setup) root
	@echo '  LINT    tools'
	@tools/setup/crates restore
	@# In the profile of everything else, so that what runs in the compiler is compiled once.
	@$(cargo) clippy $(manifest) --workspace --all-targets --release --locked --quiet -- -D warnings

##@ Set-up

.PHONY: setup
setup: ## bring everything that any target needs into the cache
	@$(setup) all

# Where `make -C KDIR M=$PWD` without MO leaves things.
module_dirs := . driver logic mm virtio

.PHONY: clean
clean: ## remove everything that was built here; the cache stays
	@rm -rf build
	@rm -f $(foreach dir,$(module_dirs),$(wildcard $(addprefix $(dir)/,*.o *.ko *.mod *.mod.c *.rmeta .*.cmd .*.d \
		.module-common.o Module.symvers modules.order bindings_generated.rs bindings_helpers_generated.rs)))

.PHONY: distclean
distclean: clean ## the same, and remove the cache
	@$(setup) --remove-cache

.PHONY: help
help: ## list the targets
	@awk -F ':[^#]*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-z_ -]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' Makefile
