#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# packages.sh FOLDER: chooses the stock kernel and fetches its packages. Leaves in FOLDER:
#   release                 what `uname -r` says there
#   source-version          version of the source package
#   headers/ vmlinuz lib/   .config, Module.symvers, vmlinux; the kernel; its modules
#   linux-source.tar.xz     the source it was built from
#
# Looks up what the mirror offers now, so that a release that went away never breaks the set-up.

set -euo pipefail
dest=$1
here=$(cd "$(dirname "$0")/.." && pwd -P)
flavour=cloud-amd64

mkdir -p "$dest"/apt/{lists,cache,debs,unpacked}
: >"$dest/apt/status"
in_apt() {
	local tool=$1
	shift
	"$here/in-root" "$tool" -o Dir::State::Lists="$dest/apt/lists" -o Dir::Cache="$dest/apt/cache" \
		-o Dir::State::status="$dest/apt/status" -o APT::Sandbox::User=root -o Acquire::Languages=none \
		-o APT::Update::Error-Mode=any "$@"
}
in_apt apt-get update

# versions_of PACKAGE: prints every version that the mirror has, newest first.
versions_of() {
	in_apt apt-cache madison "$1" | awk -F' *[|] *' '{ print $2 }' | sort -rV -u
}

# Every release with headers of our flavour, newest first; the release's own kernel has no Rust and no
# source package of the backport, and is left out by that.
offered=$(in_apt apt-cache pkgnames linux-headers- |
	sed -nE "s/^linux-headers-([0-9.]+\+deb[0-9]+)-$flavour\$/\1/p" | sort -rV)
echo "offered: $(paste -sd' ' <<<"$offered")"
tested=$(grep -vE '^(#|$)' "$here/tested-kernels" | sort -rV)

# complete RELEASE: sets the variables below if everything needed for it is offered in one version.
complete() {
	local number=${1%%+*} version
	source_package=linux-source-${number%.*}
	[[ $number == *.*.* ]] || source_package=linux-source-$number
	package_version=$(versions_of "linux-headers-$1-$flavour" | head -n 1)
	for version in $(versions_of "$source_package"); do
		if [[ $version == "$package_version" ]]; then
			return 0
		fi
	done
	return 1
}

chosen=
for release in $tested; do
	if grep -qxF "$release" <<<"$offered" && complete "$release"; then
		chosen=$release
		break
	fi
done
if [[ -z $chosen ]]; then
	for release in $offered; do
		# Older kernels lack what the module is written against.
		if dpkg --compare-versions "$release" ge 7.3 && complete "$release"; then
			chosen=$release
			echo "warning: the mirror offers none of the tested kernels ($(paste -sd' ' <<<"$tested"));" \
				"using $chosen, with which this module was not tested"
			break
		fi
	done
fi
if [[ -z $chosen ]]; then
	echo "the mirror offers no $flavour kernel from 7.3 on with its source; it has: $(paste -sd' ' <<<"$offered")"
	exit 1
fi
name=$chosen-$flavour
echo "chosen: $name, version $package_version"

# The kernel image is in linux-binary-* or, in other releases, in linux-image-*; modules likewise.
names=$(in_apt apt-cache pkgnames linux-)
wanted=("linux-headers-$name=$package_version" "$source_package=$package_version")
if grep -qxF "linux-binary-$name" <<<"$names"; then
	wanted+=("linux-binary-$name=$package_version" "linux-modules-$name=$package_version")
else
	wanted+=("linux-image-$name=$package_version")
fi
(cd "$dest/apt/debs" && in_apt apt-get download "${wanted[@]}")

for deb in "$dest"/apt/debs/*.deb; do
	"$here/in-root" dpkg-deb -x "$deb" "$dest/apt/unpacked"
done
u=$dest/apt/unpacked
mkdir "$dest/headers"
mv "$u/usr/src/linux-headers-$name"/{.config,Module.symvers} "$dest/headers/"
# Only there for type information of modules.
mv "$u/usr/src/linux-headers-$name/vmlinux" "$dest/headers/" || true
mkdir -p "$dest/lib/modules"
if [[ -d $u/usr/lib/modules/$name ]]; then
	mv "$u/usr/lib/modules/$name" "$dest/lib/modules/"
else
	mv "$u/lib/modules/$name" "$dest/lib/modules/"
fi
rm -f "$dest/lib/modules/$name"/{build,source}
if [[ -e $dest/lib/modules/$name/vmlinuz ]]; then
	mv "$dest/lib/modules/$name/vmlinuz" "$dest/vmlinuz"
else
	mv "$u/boot/vmlinuz-$name" "$dest/vmlinuz"
fi
# Which module needs which.
"$here/in-root" depmod -b "$dest" "$name"
mv "$u/usr/src/$source_package.tar.xz" "$dest/linux-source.tar.xz"
echo "$name" >"$dest/release"
echo "$package_version" >"$dest/source-version"
rm -rf "$dest/apt"
