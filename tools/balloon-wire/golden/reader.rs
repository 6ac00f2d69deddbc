// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Reads the golden files; a part of each test program that does.

use serde::Deserialize;

/// The examples of a file.
pub(crate) fn load<T: for<'a> Deserialize<'a>>(text: &str) -> Vec<T> {
    serde_json::from_str(text).expect("good JSON")
}

/// Bytes as the files and the document have them: hexadecimal, in words; `XX*N` is N bytes `XX`.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let byte = |s: &str| u8::from_str_radix(s, 16).expect("hexadecimal");
    text.split_whitespace()
        .flat_map(|word| match word.split_once('*') {
            Some((value, count)) => vec![byte(value); count.parse().expect("a count")],
            None => (0..word.len())
                .step_by(2)
                .map(|i| byte(&word[i..i + 2]))
                .collect(),
        })
        .collect()
}
