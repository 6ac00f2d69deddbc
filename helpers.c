// SPDX-License-Identifier: GPL-2.0
/*
 * C inlines and macros that bindgen cannot bind. Nothing is decided here: what each function may be
 * called for is the business of the Rust wrapper that calls it.
 */
#include <linux/balloon.h>
#include <linux/crash_dump.h>
#include <linux/device.h>
#include <linux/memory.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/pm_wakeup.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/suspend.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/vmstat.h>

int vbrs_helper_virtio_find_vqs(struct virtio_device *vdev, unsigned int nvqs,
				struct virtqueue **vqs, struct virtqueue_info *info)
{
	return virtio_find_vqs(vdev, nvqs, vqs, info, NULL);
}

void vbrs_helper_virtio_del_vqs(struct virtio_device *vdev)
{
	vdev->config->del_vqs(vdev);
}

void vbrs_helper_virtio_device_ready(struct virtio_device *vdev)
{
	virtio_device_ready(vdev);
}

bool vbrs_helper_virtio_test_bit(const struct virtio_device *vdev, unsigned int fbit)
{
	return __virtio_test_bit(vdev, fbit);
}

void vbrs_helper_virtio_clear_bit(struct virtio_device *vdev, unsigned int fbit)
{
	__virtio_clear_bit(vdev, fbit);
}

void vbrs_helper_virtio_set_bit(struct virtio_device *vdev, unsigned int fbit)
{
	__virtio_set_bit(vdev, fbit);
}

bool vbrs_helper_virtio_has_config(const struct virtio_device *vdev)
{
	return vdev->config->get && vdev->config->set;
}

void vbrs_helper_virtio_config_get(struct virtio_device *vdev, unsigned int offset, void *buf,
				   unsigned int len)
{
	vdev->config->get(vdev, offset, buf, len);
}

void vbrs_helper_virtio_config_set(struct virtio_device *vdev, unsigned int offset,
				   const void *buf, unsigned int len)
{
	vdev->config->set(vdev, offset, buf, len);
}

const char *vbrs_helper_virtio_transport(const struct virtio_device *vdev)
{
	return vdev->dev.parent ? dev_driver_string(vdev->dev.parent) : "";
}

void vbrs_helper_device_set_wakeup_capable(struct device *dev, bool capable)
{
	device_set_wakeup_capable(dev, capable);
}

void vbrs_helper_pm_stay_awake(struct device *dev)
{
	pm_stay_awake(dev);
}

void vbrs_helper_pm_relax(struct device *dev)
{
	pm_relax(dev);
}

void vbrs_helper_sg_set_buf(struct scatterlist *sg, const void *buf, unsigned int len)
{
	sg_set_buf(sg, buf, len);
}

void vbrs_helper_sg_set_block(struct scatterlist *sg, struct page *page, unsigned int order)
{
	sg_set_page(sg, page, PAGE_SIZE << order, 0);
}

void vbrs_helper_cond_resched(void)
{
	cond_resched();
}

struct page *vbrs_helper_alloc_pages(gfp_t gfp, unsigned int order)
{
	return alloc_pages(gfp, order);
}

unsigned long vbrs_helper_alloc_pages_bulk(gfp_t gfp, unsigned long n, struct page **pages)
{
	return alloc_pages_bulk(gfp, n, pages);
}

unsigned long vbrs_helper_page_to_pfn(const struct page *page)
{
	return page_to_pfn(page);
}

struct page *vbrs_helper_nth_page(struct page *page, unsigned long n)
{
	return page + n;
}

void vbrs_helper_get_page(struct page *page)
{
	get_page(page);
}

/* One call for a block: 512 calls from Rust would cost as much as the marks themselves. */
void vbrs_helper_set_offline(struct page *page, unsigned long n)
{
	while (n--)
		__SetPageOffline(page++);
}

void vbrs_helper_clear_offline(struct page *page, unsigned long n)
{
	while (n--)
		__ClearPageOffline(page++);
}

bool vbrs_helper_page_offline(const struct page *page)
{
	return PageOffline(page);
}

/* The list fields of a page that its owner uses as it likes. */
void vbrs_helper_page_set_link(struct page *page, void *next, unsigned long order)
{
	page->lru.next = next;
	page->lru.prev = (void *)order;
}

void *vbrs_helper_page_next(const struct page *page)
{
	return page->lru.next;
}

unsigned long vbrs_helper_page_order(const struct page *page)
{
	return (unsigned long)page->lru.prev;
}

/* As above: a call for a chunk. */
void vbrs_helper_list_add_pages(struct page *page, unsigned long n, struct list_head *list)
{
	while (n--)
		list_add(&page++->lru, list);
}

struct zone *vbrs_helper_page_zone(const struct page *page)
{
	return page_zone(page);
}

struct page *vbrs_helper_pfn_to_online_page(unsigned long pfn)
{
	return pfn_to_online_page(pfn);
}

/* The next node with memory or processors behind one, or the first one behind -1; -1 if there is none. */
int vbrs_helper_next_node(int nid)
{
	nid = nid < 0 ? first_online_node : next_online_node(nid);
	return nid < MAX_NUMNODES ? nid : -1;
}

unsigned long vbrs_helper_pageblock_pages(void)
{
	return pageblock_nr_pages;
}

/* The frames from the first page of all nodes to the last one. */
unsigned long vbrs_helper_first_pfn(void)
{
	unsigned long first = ULONG_MAX;
	int nid;

	for_each_online_node(nid)
		if (node_start_pfn(nid) < node_end_pfn(nid))
			first = min(first, node_start_pfn(nid));
	return first;
}

unsigned long vbrs_helper_end_pfn(void)
{
	unsigned long end = 0;
	int nid;

	for_each_online_node(nid)
		end = max(end, node_end_pfn(nid));
	return end;
}

/* The free pages in blocks of at least that order; what is read without a lock is an estimate. */
unsigned long vbrs_helper_pages_in_free_blocks(unsigned int order)
{
	unsigned long pages = 0;
	unsigned int i, o;
	int nid;

	for_each_online_node(nid)
		for (i = 0; i < MAX_NR_ZONES; i++)
			for (o = order; o < NR_PAGE_ORDERS; o++)
				pages += data_race(NODE_DATA(nid)->node_zones[i].free_area[o].nr_free) << o;
	return pages;
}

unsigned long vbrs_helper_zone_lock(struct zone *zone)
{
	unsigned long flags;

	spin_lock_irqsave(&zone->lock, flags);
	return flags;
}

void vbrs_helper_zone_unlock(struct zone *zone, unsigned long flags)
{
	spin_unlock_irqrestore(&zone->lock, flags);
}

/* The order of the free block that begins with a page, or -1. The zone must be locked. */
int vbrs_helper_free_order(const struct page *page)
{
	return PageBuddy(page) ? (int)page_private(page) : -1;
}

/* The number of pages before the first one that begins a free block. As above: a call for many. */
unsigned long vbrs_helper_pages_in_use(const struct page *page, unsigned long n)
{
	unsigned long i;

	for (i = 0; i < n; i++)
		if (PageBuddy(page + i))
			break;
	return i;
}

/* The number of pages before the first one that is offline and has one of two marks. */
unsigned long vbrs_helper_pages_unmarked(const struct page *page, unsigned long n,
					 unsigned long mark, unsigned long other)
{
	unsigned long i, private;

	for (i = 0; i < n; i++) {
		private = READ_ONCE(page[i].private);
		if (PageOffline(page + i) && (private == mark || private == other))
			break;
	}
	return i;
}

void vbrs_helper_set_page_mark(struct page *page, unsigned long mark)
{
	WRITE_ONCE(page->private, mark);
}

struct page *vbrs_helper_list_pop_page(struct list_head *list)
{
	struct page *page = list_first_entry_or_null(list, struct page, lru);

	if (page)
		list_del(&page->lru);
	return page;
}

void vbrs_helper_init_list_head(struct list_head *list)
{
	INIT_LIST_HEAD(list);
}

void vbrs_helper_balloon_devinfo_init(struct balloon_dev_info *info)
{
	balloon_devinfo_init(info);
}

void vbrs_helper_mod_balloon_pages(struct page *page, long n)
{
	mod_node_page_state(page_pgdat(page), NR_BALLOON_PAGES, n);
}

void vbrs_helper_count_inflate(long n)
{
	count_vm_events(BALLOON_INFLATE, n);
}

void vbrs_helper_count_deflate(long n)
{
	count_vm_events(BALLOON_DEFLATE, n);
}

int vbrs_helper_register_pm_notifier(struct notifier_block *nb)
{
	return register_pm_notifier(nb);
}

void vbrs_helper_unregister_pm_notifier(struct notifier_block *nb)
{
	unregister_pm_notifier(nb);
}

int vbrs_helper_register_memory_notifier(struct notifier_block *nb)
{
	return register_memory_notifier(nb);
}

void vbrs_helper_unregister_memory_notifier(struct notifier_block *nb)
{
	unregister_memory_notifier(nb);
}

bool vbrs_helper_is_kdump_kernel(void)
{
	return is_kdump_kernel();
}

bool vbrs_helper_want_init_on_free(void)
{
	return want_init_on_free();
}

bool vbrs_helper_page_poisoning_enabled_static(void)
{
	return page_poisoning_enabled_static();
}

unsigned long vbrs_helper_global_node_page_state(enum node_stat_item item)
{
	return global_node_page_state(item);
}

/* The free pages, with those that each processor keeps for itself, which the counter leaves out. */
unsigned long vbrs_helper_free_pages(void)
{
	unsigned long pages = 0;
	struct zone *zone;
	int nid, cpu, i;

	for_each_online_node(nid) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			zone = &NODE_DATA(nid)->node_zones[i];
			if (!populated_zone(zone))
				continue;
			pages += zone_page_state_snapshot(zone, NR_FREE_PAGES);
			for_each_online_cpu(cpu)
				pages += data_race(per_cpu_ptr(zone->per_cpu_pageset, cpu)->count);
		}
	}
	return pages;
}

unsigned long vbrs_helper_totalram_pages(void)
{
	return totalram_pages();
}
