#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# stock.sh FOLDER: makes a tree to build modules for the stock kernel. Its headers package has no Rust
# metadata; we make it again from the same source, configuration and compilers. Leaves in FOLDER:
#   kdir/     for `make M=...`
#   vmlinuz   the stock kernel
#   modules/  modules of it, ready for insmod

dest=$1
# shellcheck source=kbuild.sh
. "$(dirname "$0")/kbuild.sh"
packages=$(path_of packages)
release=$(<"$packages/release")
tree=$dest/kdir

mkdir "$tree"
cp "$packages"/headers/{.config,Module.symvers} "$tree/"
if [[ -e $packages/headers/vmlinux ]]; then
	cp "$packages/headers/vmlinux" "$tree/"
fi
# 7.3.4+deb13-cloud-amd64: what comes after the number of the source.
number=$("$setup_dir/in-root" make -s -C "$linux" kernelversion)
echo "${release#"$number"}" >"$tree/localversion"

kmake "$tree" "${x86[@]}" rustavailable olddefconfig modules_prepare

built=$(<"$tree/include/config/kernel.release")
[[ $built == "$release" ]] || {
	echo "the tree calls itself $built, not $release"
	exit 1
}
changed=$(diff <(grep -v '^#' "$packages/headers/.config") <(grep -v '^#' "$tree/.config") || true)
[[ -z $changed ]] || echo "warning: the stock configuration changed: $(paste -sd' ' <<<"$changed")"

# Every Rust symbol that we made must be one that the stock kernel exports: crate hashes are in the names.
sed -nE 's/^EXPORT_SYMBOL_RUST_GPL\((.*)\);/\1/p' "$tree"/rust/exports_*_generated.h | sort -u >"$dest/rust-exports"
awk '$3 == "vmlinux" { print $2 }' "$tree/Module.symvers" | sort -u >"$dest/stock-exports"
echo "Rust symbols: $(wc -l <"$dest/rust-exports")"
strange=$(comm -23 "$dest/rust-exports" "$dest/stock-exports")
if [[ ! -s $dest/rust-exports || -n $strange ]]; then
	echo "the regenerated Rust metadata does not fit the stock kernel: modules would not load; for example:"
	head -n 5 <<<"$strange"
	exit 1
fi
rm "$dest/rust-exports" "$dest/stock-exports"

cp "$packages/vmlinuz" "$dest/vmlinuz"
mkdir "$dest/modules"
for name in virtio_balloon virtio_mmio virtio_blk virtio_mem zram; do
	# "path of the module: paths of what it depends on"; those must be loaded from right to left.
	read -ra files < <(grep -E "(^|/)${name}\.ko[^:/]*:" "$packages/lib/modules/$release/modules.dep" | tr -d ':') ||
		continue # built in, or not there
	order=
	for file in "${files[@]}"; do
		base=${file##*/}
		order="${base%.xz}${order:+ $order}"
		case $file in
		*.xz) "$setup_dir/in-root" xz -dc "$packages/lib/modules/$release/$file" >"$dest/modules/${base%.xz}" ;;
		*) cp "$packages/lib/modules/$release/$file" "$dest/modules/" ;;
		esac
	done
	echo "$order" >>"$dest/modules/load-order"
done
finish "$tree"
