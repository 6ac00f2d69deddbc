#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# root.sh FOLDER: makes the tool root in FOLDER/tree, from the Debian mirror that this machine uses.

set -euo pipefail
dest=$1
here=$(cd "$(dirname "$0")/.." && pwd -P)
suite=trixie

command -v apt-get >/dev/null || {
	echo "no apt-get here: the set-up needs a Debian machine"
	exit 1
}

# The mirror of this machine's own Debian entries, never the one of its security updates.
find_mirror() {
	# shellcheck disable=SC2016
	apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
		sed -n 's/^Debian|Debian|main|\(.*\)$/\1/p' | grep -v '^cdrom:' | head -n 1
}

mirror=$(find_mirror || true)
if [[ -z $mirror ]]; then
	# A machine without package lists.
	apt-get update
	mirror=$(find_mirror || true)
fi
if [[ -z $mirror ]]; then
	echo "no Debian mirror found in this machine's apt configuration"
	exit 1
fi
echo "mirror: $mirror"

if ! command -v mmdebstrap >/dev/null; then
	install=(apt-get install -y --no-install-recommends mmdebstrap)
	DEBIAN_FRONTEND=noninteractive "${install[@]}" || {
		apt-get update
		DEBIAN_FRONTEND=noninteractive "${install[@]}"
	}
fi

include=$(grep -vE '^(#|$)' "$here/packages" | paste -sd,)

# How this machine's apt reaches its mirror (proxies, time-outs, checks of dates).
apt-config dump | grep -E '^Acquire::(http|https|ftp|Retries|Check|Max)' >"$dest/apt.conf" || true

# shellcheck disable=SC2016 # the hook's own shell expands these
options=(
	--mode=root --variant=minbase
	--aptopt='Apt::Install-Recommends "false"'
	--aptopt="$dest/apt.conf"
	# Large and not needed: static LLVM libraries, compiler sources other than the libraries, texts.
	--dpkgopt='path-exclude=/usr/lib/llvm-*/lib/*.a'
	--dpkgopt='path-exclude=/usr/lib/llvm-*/include/*'
	--dpkgopt='path-exclude=/usr/src/rustc-*/src/*'
	--dpkgopt='path-exclude=/usr/src/rustc-*/compiler/*'
	--dpkgopt='path-include=/usr/src/rustc-*/library/*'
	--dpkgopt='path-exclude=/usr/share/doc/*'
	--dpkgopt='path-include=/usr/share/doc/*/copyright'
	--dpkgopt='path-exclude=/usr/share/info/*'
	--dpkgopt='path-exclude=/usr/share/locale/*'
	--dpkgopt='path-exclude=/usr/share/man/*'
	--setup-hook='mkdir -p "$1/etc/apt/preferences.d" && cp "$VBRS_PREFERENCES" "$1/etc/apt/preferences.d/vbrs"'
	--include="$include"
)
VBRS_PREFERENCES=$here/apt-preferences mmdebstrap "${options[@]}" "$suite" "$dest/tree" \
	"deb $mirror $suite main" "deb $mirror $suite-backports main"

dpkg-query --admindir="$dest/tree/var/lib/dpkg" -W >"$dest/installed"
# The packages that what we build depends on; part of the keys of kernels.
grep -E '^(gcc-14|binutils|rustc|rust-src|bindgen|libclang1-[0-9]+|flex|bison|make|libc6-dev)(:[a-z0-9]+)?[[:space:]]' \
	"$dest/installed" >"$dest/toolchain"
