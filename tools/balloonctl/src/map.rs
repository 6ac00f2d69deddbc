// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A picture of which memory is free.

use std::io::{self, Write};

use balloon_control::BALLOON_PAGE_BYTES;

/// Pixels in a row.
const WIDTH: u64 = 1024;
/// The most rows; beyond that a pixel stands for more pages.
const HEIGHT_MAX: u64 = 1024;

/// Grey pixels, row by row: the more of its pages are free, the lighter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) pixels: Vec<u8>,
}

impl Map {
    /// Draws the regions of memory one after the other, without what is between them. `runs` ascend.
    pub(crate) fn draw(regions: &[(u64, u64)], runs: &[(u64, u64)]) -> Self {
        let total: u64 = regions
            .iter()
            .map(|(_, bytes)| bytes / BALLOON_PAGE_BYTES)
            .sum();
        let per_pixel = total.div_ceil(WIDTH * HEIGHT_MAX).next_power_of_two();
        let height = total.div_ceil(per_pixel * WIDTH).max(1);
        let mut free = vec![0u64; (WIDTH * height) as usize];
        let mut before = 0;
        for (start, bytes) in regions {
            let end = start.saturating_add(*bytes);
            for (from, len) in runs {
                let to = from.saturating_add(*len).min(end);
                let from = (*from).max(*start);
                if from >= to {
                    continue;
                }
                let page = |addr: u64| before + (addr - start) / BALLOON_PAGE_BYTES;
                let (mut at, last) = (page(from), page(to));
                while at < last {
                    let pixel = at / per_pixel;
                    let next = last.min((pixel + 1) * per_pixel);
                    if let Some(count) = free.get_mut(pixel as usize) {
                        *count += next - at;
                    }
                    at = next;
                }
            }
            before += bytes / BALLOON_PAGE_BYTES;
        }
        let shade = |count: &u64| u8::try_from(count * 255 / per_pixel).unwrap_or(u8::MAX);
        Self {
            width: WIDTH as u32,
            height: height as u32,
            pixels: free.iter().map(shade).collect(),
        }
    }

    /// Writes it as PNG.
    pub(crate) fn write(&self, to: impl Write) -> io::Result<()> {
        let mut encoder = png::Encoder::new(to, self.width, self.height);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        Ok(writer.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = BALLOON_PAGE_BYTES;

    #[test]
    fn a_pixel_for_a_page_where_there_are_few() {
        let regions = [(0, 1024 * PAGE), (1 << 32, 512 * PAGE)];
        let runs = [(PAGE, 2 * PAGE), (1023 * PAGE, 5 * PAGE), (1 << 32, PAGE)];
        let map = Map::draw(&regions, &runs);
        assert_eq!((map.width, map.height), (1024, 2));
        let white: Vec<_> = (0..map.pixels.len())
            .filter(|i| map.pixels[*i] == 255)
            .collect();
        assert_eq!(white, [1, 2, 1023, 1024]);
        assert!(map.pixels.iter().all(|p| [0, 255].contains(p)));
    }

    #[test]
    fn a_pixel_for_many_pages_where_there_are_many() {
        // 64 GiB are 16 pages for each pixel.
        let map = Map::draw(&[(0, 64 << 30)], &[(0, 24 * PAGE), (32 * PAGE, 4 * PAGE)]);
        assert_eq!((map.width, map.height), (1024, 1024));
        assert_eq!(map.pixels[..4], [255, 127, 63, 0]);
    }

    #[test]
    fn a_picture_that_can_be_read() {
        let map = Map::draw(&[(0, 4 << 20)], &[(0, 1 << 20)]);
        let mut bytes = Vec::new();
        map.write(&mut bytes).expect("written");
        let mut reader = png::Decoder::new(io::Cursor::new(bytes))
            .read_info()
            .expect("a picture");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut pixels).expect("a frame");
        assert_eq!((info.width, info.height), (map.width, map.height));
        assert_eq!(pixels, map.pixels);
        // Without a guest there is nothing to see.
        assert_eq!(Map::draw(&[], &[]).pixels, vec![0; 1024]);
    }
}
