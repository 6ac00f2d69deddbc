// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! Brings `vbrs-bench-guest` into a guest whose initramfs has it not.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use vm_runner::machine::{COMMAND, Machine};
use vm_runner::paths;

/// Where it is in a guest.
pub const HELPER: &str = "/bin/vbrs-bench-guest";

/// Makes sure that the guest has it.
///
/// # Errors
///
/// If it cannot be read, or does not arrive.
pub fn bring(machine: &Machine) -> Result<()> {
    /// Bytes that go over in one command: with all around them, they must fit into a terminal's buffer of
    /// 4096 bytes.
    const PIECE: usize = 2 << 10;

    let there = |path: &str| {
        machine
            .run(&format!("test -x {path}"), COMMAND)
            .map(|outcome| outcome.ok())
    };
    if there(HELPER)? {
        return Ok(());
    }
    let program = packed(&paths::sibling("vbrs-bench-guest")?)?;
    for piece in program.chunks(PIECE) {
        let command = format!("base64 -d >>{HELPER}.gz <<.\n{}\n.", base64(piece));
        let outcome = machine.run(&command, COMMAND);
        let outcome = outcome.map_err(|_| anyhow!("the helper does not arrive in the guest"))?;
        ensure!(
            outcome.ok(),
            "the guest cannot take the helper: {}",
            outcome.output
        );
    }
    machine.sh(&format!("gunzip {HELPER}.gz && chmod +x {HELPER}"))?;
    Ok(())
}

/// A program, compressed.
fn packed(path: &Path) -> Result<Vec<u8>> {
    let mut command = Command::new("gzip");
    let out = command.arg("-9c").arg(path).output().context("run gzip")?;
    ensure!(
        out.status.success(),
        "gzip: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(out.stdout)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word = three
            .iter()
            .fold(0_u32, |word, &b| (word << 8) | u32::from(b));
        let word = word << (8 * (3 - three.len()));
        for i in 0..4 {
            if i <= three.len() {
                let digit = (word >> (18 - 6 * i)) & 63;
                let _infallible = write!(text, "{}", char::from(DIGITS[digit as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn as_in_the_rfc() {
        for (plain, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xef, 0xbe]), "/+++");
    }
}
