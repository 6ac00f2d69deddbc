/* SPDX-License-Identifier: GPL-2.0 */
/* What bindgen reads for `bindings.rs`: headers, and macros made into constants. */
#include <linux/balloon.h>
#include <linux/gfp.h>
#include <linux/memory.h>
#include <linux/migrate.h>
#include <linux/mmzone.h>
#include <linux/oom.h>
#include <linux/page_reporting.h>
#include <linux/poison.h>
#include <linux/shrinker.h>
#include <linux/sort.h>
#include <linux/suspend.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/workqueue.h>
#include <uapi/linux/virtio_balloon.h>
#include <uapi/linux/virtio_pci.h>
#include <uapi/linux/virtio_ring.h>

/*
 * No reserves, no OOM killer, no warning, at most one light round of reclaim: what the C driver
 * allows itself for a single page, and what compaction can move afterwards.
 */
const gfp_t RUST_CONST_HELPER_VBRS_GFP_PAGE = __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN |
	(IS_ENABLED(CONFIG_BALLOON_MIGRATION) ? GFP_HIGHUSER_MOVABLE : GFP_HIGHUSER);
/* The same without any reclaim or compaction, and not from where only movable pages may be. */
const gfp_t RUST_CONST_HELPER_VBRS_GFP_BLOCK =
	((GFP_HIGHUSER | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN) & ~__GFP_RECLAIM);
/* The same for memory that is to become pages that can be moved. */
const gfp_t RUST_CONST_HELPER_VBRS_GFP_CHUNK =
	RUST_CONST_HELPER_VBRS_GFP_BLOCK | (IS_ENABLED(CONFIG_BALLOON_MIGRATION) ? __GFP_MOVABLE : 0);
const unsigned int RUST_CONST_HELPER_VBRS_MAX_PAGE_ORDER = MAX_PAGE_ORDER;
const u8 RUST_CONST_HELPER_VBRS_PAGE_POISON = PAGE_POISON;
/*
 * The default order is that of a pageblock, 512 MiB with 64 KiB pages, of which there is hardly ever
 * a free one: 2 MiB there, as in the C driver.
 */
const unsigned int RUST_CONST_HELPER_VBRS_REPORTING_ORDER =
	PAGE_SHIFT == 16 ? 5 : PAGE_REPORTING_ORDER_UNSPECIFIED;
const unsigned int RUST_CONST_HELPER_VBRS_WQ_UNBOUND = WQ_UNBOUND;
const unsigned long RUST_CONST_HELPER_VBRS_PM_HIBERNATION_PREPARE = PM_HIBERNATION_PREPARE;
const unsigned long RUST_CONST_HELPER_VBRS_PM_POST_HIBERNATION = PM_POST_HIBERNATION;
/* Signed, since bindgen makes no constant of the largest unsigned long. */
const long RUST_CONST_HELPER_VBRS_SHRINK_STOP = (long)SHRINK_STOP;

/* `bindings.rs` compares these with what Rust makes of the same types. */
const size_t RUST_CONST_HELPER_VBRS_SIZEOF_VIRTIO_DEVICE = sizeof(struct virtio_device);
const size_t RUST_CONST_HELPER_VBRS_OFFSETOF_VIRTIO_DEVICE_DEV = offsetof(struct virtio_device, dev);
const size_t RUST_CONST_HELPER_VBRS_OFFSETOF_VIRTIO_DEVICE_PRIV = offsetof(struct virtio_device, priv);
const size_t RUST_CONST_HELPER_VBRS_SIZEOF_VIRTIO_DRIVER = sizeof(struct virtio_driver);
const size_t RUST_CONST_HELPER_VBRS_SIZEOF_VIRTQUEUE_INFO = sizeof(struct virtqueue_info);
const size_t RUST_CONST_HELPER_VBRS_OFFSETOF_VIRTQUEUE_INDEX = offsetof(struct virtqueue, index);
const size_t RUST_CONST_HELPER_VBRS_SIZEOF_BALLOON_DEV_INFO = sizeof(struct balloon_dev_info);
