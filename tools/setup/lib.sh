# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
# shellcheck disable=SC2034 # variables are used by those who source this
#
# What the set-up scripts share: where things live, how a component's key is made, messages.
# To be sourced. Deliberately no part of any key: a change here must not rebuild a kernel.

setup_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
repo_dir=$(cd "$setup_dir/../.." && pwd -P)
cache_dir=$(realpath -m "${VBRS_CACHE:-${HOME:-/root}/.cache/vbrs}")
export VBRS_CACHE=$cache_dir

# Every component, in the order in which they are made.
all_components=(root packages source stock uml uml-lean debug)

say() {
	printf '  %-7s %s\n' SETUP "$*" >&2
}

die() {
	printf 'setup: %s\n' "$*" >&2
	exit 1
}

# inputs NAME: prints the files (relative to this folder) whose content decides what the component is.
inputs() {
	case $1 in
	root) echo components/root.sh packages apt-preferences ;;
	packages) echo components/packages.sh tested-kernels ;;
	source) echo components/source.sh ;;
	stock) echo components/stock.sh components/kbuild.sh ;;
	uml) echo components/uml.sh components/kbuild.sh kconfig/{common,debug,uml,uml-debug}.config ;;
	uml-lean) echo components/uml-lean.sh components/kbuild.sh kconfig/{common,uml,uml-lean}.config ;;
	debug) echo components/debug.sh components/kbuild.sh kconfig/{common,debug,x86-debug}.config ;;
	*) die "unknown component '$1'" ;;
	esac
}

# versions NAME: prints what else decides it: versions of packages and keys of components it is made from.
# Fails if one of those is not there yet.
versions() {
	case $1 in
	root | packages) ;;
	source) cat "$(path_of packages)/source-version" ;;
	stock) key_of packages && key_of source && cat "$(path_of root)/toolchain" ;;
	*) key_of source && cat "$(path_of root)/toolchain" ;;
	esac 2>/dev/null
}

# key_of NAME: prints the component's key.
key_of() {
	local files extra
	read -ra files < <(inputs "$1")
	extra=$(versions "$1") || return 1
	(cd "$setup_dir" && {
		sha256sum "${files[@]}"
		printf '%s\n' "$extra"
	} | sha256sum | cut -c1-12)
}

# path_of NAME: prints the component's folder, whether it is there or not.
path_of() {
	local key
	key=$(key_of "$1") && printf '%s/%s/%s\n' "$cache_dir" "$1" "$key"
}

# present NAME: succeeds if the component is complete.
present() {
	local path
	path=$(path_of "$1") && [[ -e $path/.complete ]]
}
