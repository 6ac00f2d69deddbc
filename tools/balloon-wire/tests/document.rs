// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! The examples of `Documentation/protocol.rst` are those of `golden/`, byte for byte.

#[path = "../golden/reader.rs"]
mod reader;

use std::collections::BTreeMap;

use reader::{load, unhex};
use serde_json::Value;

const DOCUMENT: &str = include_str!("../../../Documentation/protocol.rst");

const FILES: [(&str, &str); 7] = [
    ("records", include_str!("../golden/records.json")),
    ("requests", include_str!("../golden/requests.json")),
    ("refused", include_str!("../golden/refused.json")),
    (
        "announcements",
        include_str!("../golden/announcements.json"),
    ),
    ("pfn-arrays", include_str!("../golden/pfn-arrays.json")),
    (
        "host-requests",
        include_str!("../golden/host-requests.json"),
    ),
    ("answers", include_str!("../golden/answers.json")),
];

/// The requests of each example, by "FILE / NAME".
type Examples = BTreeMap<String, Vec<Vec<u8>>>;

/// A block begins with `golden: FILE / NAME` and ends with a blank line. Each line has bytes, then at
/// least two blanks, then words; `--` ends a request.
fn in_document() -> Examples {
    let mut examples = Examples::new();
    let mut lines = DOCUMENT.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.trim().strip_prefix("golden: ") else {
            continue;
        };
        let mut requests = vec![Vec::new()];
        for line in lines.by_ref().take_while(|l| !l.trim().is_empty()) {
            // An indentation of four; a line without bytes is all blanks there.
            let line = line.strip_prefix("    ").expect("indented");
            if line == "--" {
                requests.push(Vec::new());
                continue;
            }
            let (bytes, _words) = line.split_once("  ").expect("bytes and words");
            requests
                .last_mut()
                .expect("one at least")
                .extend(unhex(bytes));
        }
        assert!(
            examples.insert(name.to_owned(), requests).is_none(),
            "{name} is there twice"
        );
    }
    examples
}

fn in_files() -> Examples {
    let mut examples = Examples::new();
    for (file, text) in FILES {
        for example in load::<Value>(text) {
            let text = |value: &Value| unhex(value.as_str().expect("a text"));
            let one = ["request", "bytes"].iter().find_map(|key| example.get(key));
            let requests = match (one, example.get("requests")) {
                (Some(one), None) => vec![text(one)],
                (None, Some(all)) => all.as_array().expect("a list").iter().map(text).collect(),
                _ => panic!("{file}: {example}"),
            };
            let name = example["name"].as_str().expect("a name");
            assert!(
                examples
                    .insert(format!("{file} / {name}"), requests)
                    .is_none()
            );
        }
    }
    examples
}

#[test]
fn the_document_has_the_golden_bytes() {
    let (document, files) = (in_document(), in_files());
    for (name, requests) in &files {
        assert_eq!(
            document.get(name),
            Some(requests),
            "{name}, in the document"
        );
    }
    for name in document.keys() {
        assert!(files.contains_key(name), "{name} is in the document only");
    }
    assert!(files.len() >= 12);
}
