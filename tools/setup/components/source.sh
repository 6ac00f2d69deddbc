#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# source.sh FOLDER: unpacks the kernel source into FOLDER/linux.
#
# Half of it is drivers that no kernel of ours has: their C files are left out (configuration files
# and Rust files stay), which saves most of the time and space.

set -euo pipefail
dest=$1
# shellcheck source=../lib.sh
. "$(dirname "$0")/../lib.sh"
packages=$(path_of packages)

exclude=()
for dir in drivers/{gpu,infiniband,media,net,scsi,staging} sound arch/{alpha,arc,arm,arm64,csky,hexagon,loongarch,m68k,microblaze,mips,nios2,openrisc,parisc,powerpc,riscv,s390,sh,sparc,xtensa}; do
	exclude+=("--exclude=linux-source-*/$dir/*.[chS]" "--exclude=linux-source-*/$dir/*.dts*")
done
exclude+=('--exclude=linux-source-*/Documentation/*.rst' '--exclude=linux-source-*/tools/testing/selftests')

mkdir "$dest/linux"
"$setup_dir/in-root" tar -xf "$packages/linux-source.tar.xz" -C "$dest/linux" --strip-components=1 \
	--wildcards "${exclude[@]}"
