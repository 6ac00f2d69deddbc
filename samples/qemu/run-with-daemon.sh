#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
#
# run-with-daemon.sh [OPTION...] [-- QEMU-ARGUMENT...]
#
# Starts vhost-device-balloon, then a stock QEMU (10.2 or later) with a balloon that the daemon serves,
# and cleans up when QEMU ends. Resize the balloon from another terminal:
#
#   balloonctl --control-path PATH target 1G
#
#   --memory SIZE     memory of the guest, such as 4G (default: 2G)
#   --control PATH    socket for balloonctl (default: ./balloon-control.sock)
#   --daemon PROGRAM  the daemon (default: vhost-device-balloon, as the shell finds it)
#   --qemu PROGRAM    QEMU (default: qemu-system-x86_64)
#   --accel NAMES     accelerators to try, in order (default: kvm:tcg)
#   --option OPTION   one more option for the daemon, such as --option=--block-shift=0; can be repeated
#
# What follows -- goes to QEMU: disks, kernel, network, display. For example
#
#   run-with-daemon.sh --memory 4G -- -drive file=guest.qcow2,if=virtio -nographic

set -euo pipefail

die() {
	echo "run-with-daemon.sh: $*" >&2
	exit 1
}

memory=2G
control=balloon-control.sock
daemon=vhost-device-balloon
qemu="qemu-system-x86_64"
accel=kvm:tcg
options=()

while (($# > 0)); do
	name=${1%%=*}
	case $1 in
	--)
		shift
		break
		;;
	-h | --help)
		sed -n '/^# run-with-daemon.sh/,/^$/s/^# \{0,1\}//p' "$0"
		exit 0
		;;
	--*=*)
		value=${1#*=}
		shift
		;;
	--*)
		(($# > 1)) || die "$1 needs a value (see --help)"
		value=$2
		shift 2
		;;
	*) die "'$1' is not understood; arguments for QEMU go behind -- (see --help)" ;;
	esac
	case $name in
	--memory) memory=$value ;;
	--control) control=$value ;;
	--daemon) daemon=$value ;;
	--qemu) qemu=$value ;;
	--accel) accel=$value ;;
	--option) options+=("$value") ;;
	*) die "there is no option '$name' (see --help)" ;;
	esac
done

command -v "$daemon" >/dev/null || die "$daemon is not there; 'make tools' builds it, --daemon says where it is"
command -v "$qemu" >/dev/null || die "$qemu is not there; --qemu says where it is"

# Only this script's user may reach the daemon as a frontend.
folder=$(mktemp -d)
pid=
clean_up() {
	[[ -z $pid ]] || kill "$pid" 2>/dev/null || true
	[[ -z $pid ]] || wait "$pid" 2>/dev/null || true
	rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The daemon listens first, then QEMU connects.
"$daemon" --socket-path "$folder/vhost.sock" --control-path "$control" "${options[@]}" &
pid=$!
for ((i = 0; i < 100; i++)); do
	[[ ! -S $folder/vhost.sock ]] || break
	kill -0 "$pid" 2>/dev/null || die "the daemon did not start"
	sleep 0.1
done
[[ -S $folder/vhost.sock ]] || die "the daemon does not listen"

# The daemon maps the guest's memory, so that has to be a file that is shared. config_size is the size
# of the balloon's config space with page bitmaps; see Documentation/protocol.rst.
"$qemu" \
	-machine "q35,accel=$accel,memory-backend=ram" -m "$memory" \
	-object "memory-backend-memfd,id=ram,size=$memory,share=on" \
	-chardev "socket,id=balloon,path=$folder/vhost.sock" \
	-device vhost-user-test-device-pci,id=balloon0,chardev=balloon,virtio-id=5,num_vqs=8,vq_size=128,config_size=64 \
	"$@"
