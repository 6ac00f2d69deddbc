#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# uml.sh FOLDER: builds User Mode Linux from the stock kernel's source. Leaves in FOLDER:
#   linux     the kernel, a program
#   kdir/     for `make M=... KRUSTFLAGS=-Crelocation-model=static`
#   modules/  the C driver

# shellcheck source=kbuild.sh
. "$(dirname "$0")/kbuild.sh"

build_uml "$1" common.config debug.config uml.config uml-debug.config
