#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# debug.sh FOLDER: builds an x86 kernel with all checks from the stock kernel's source. Leaves in FOLDER:
#   bzImage   the kernel
#   kdir/     for `make M=...`
#   modules/  the C driver

dest=$1
# shellcheck source=kbuild.sh
. "$(dirname "$0")/kbuild.sh"

configure "$dest/kdir" "${x86[*]}" common.config debug.config x86-debug.config
kmake "$dest/kdir" "${x86[@]}" bzImage modules
cp "$dest/kdir/arch/x86/boot/bzImage" "$dest/"
keep_modules "$dest"
finish "$dest/kdir"
