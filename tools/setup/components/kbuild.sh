# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# What the scripts that build kernels share. To be sourced.

set -euo pipefail
# shellcheck source=../lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

component=$(basename "$0" .sh)
linux=$(path_of source)/linux

# The spelling of CC matters: with it the stock configuration stays as it was shipped.
# shellcheck disable=SC2034 # for those who source this
x86=(ARCH=x86 CROSS_COMPILE=x86_64-linux-gnu- CC=x86_64-linux-gnu-gcc-14)
um=(ARCH=um CC=gcc-14 HOSTCC=gcc-14)

# kmake FOLDER ARGUMENT...: runs make for a build tree of its own.
kmake() {
	local tree=$1
	shift
	"$setup_dir/in-root" make -C "$linux" O="$tree" -j"$(nproc)" HOSTCC=gcc-14 "$@"
}

# configure FOLDER "MAKE ARGUMENTS" FRAGMENT...: makes a configuration of the fragments, later ones
# overriding earlier ones, and sees that every line of them took effect.
configure() {
	local tree=$1 arguments line symbol value missing=()
	read -ra arguments <<<"$2"
	shift 2
	declare -A wanted=()
	mkdir -p "$tree"
	(cd "$setup_dir/kconfig" && cat "$@") >"$tree/fragments.config"
	while read -r line; do
		[[ $line == CONFIG_*=* ]] || continue
		wanted[${line%%=*}]=${line#*=}
	done <"$tree/fragments.config"
	for symbol in "${!wanted[@]}"; do
		echo "$symbol=${wanted[$symbol]}"
	done | sort >"$tree/requested.config"

	kmake "$tree" "${arguments[@]}" KCONFIG_ALLCONFIG="$tree/requested.config" allnoconfig

	while IFS='=' read -r symbol value; do
		if [[ $value == n ]]; then
			! grep -q "^$symbol=" "$tree/.config" || missing+=("$symbol=n")
		else
			grep -qxF "$symbol=$value" "$tree/.config" || missing+=("$symbol=$value")
		fi
	done <"$tree/requested.config"
	if ((${#missing[@]} > 0)); then
		echo "these lines of the configuration fragments had no effect:"
		printf '    %s\n' "${missing[@]}"
		return 1
	fi
}

# finish FOLDER: makes a build tree fit to stay. Building modules against it needs neither objects nor
# archives; and it knew itself by the name it was made under.
finish() {
	local tree=$1 final
	final=$(path_of "$component")/kdir
	sed -i "s|$tree|$final|g" "$tree/Makefile"
	find "$tree" -type f \( -name '*.o' -o -name '*.a' -o -name '*.cmd' -o -name '.tmp_*' -o -name '.vmlinux*' \
		-o -name '*.ko' -o -name '*.mod' -o -name '*.mod.c' \) -delete
}

# keep_modules FOLDER: copies the modules that were built in FOLDER/kdir to FOLDER/modules.
keep_modules() {
	mkdir "$1/modules"
	find "$1/kdir" -name '*.ko' -exec cp -t "$1/modules" {} +
}

# build_uml FOLDER FRAGMENT...: all that the two User Mode Linux kernels have in common.
build_uml() {
	local dest=$1
	shift
	configure "$dest/kdir" "${um[*]}" "$@"
	kmake "$dest/kdir" "${um[@]}" linux modules
	cp "$dest/kdir/linux" "$dest/linux"
	keep_modules "$dest"
	finish "$dest/kdir"
}
