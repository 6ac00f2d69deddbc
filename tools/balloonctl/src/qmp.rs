// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! QEMU, as far as a guest has to be stopped.

use std::io::{self, BufRead as _, BufReader, Lines, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// How long QEMU may take to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to QEMU. It serves one at a time: while this is there, nobody can get in between.
pub(crate) struct Qmp {
    writer: UnixStream,
    lines: Lines<BufReader<UnixStream>>,
    /// Commands so far.
    count: u64,
}

impl Qmp {
    /// Connects. Whoever is connected already has to go first.
    ///
    /// # Errors
    ///
    /// What is wrong with the socket, or with what listens there.
    pub(crate) fn connect(socket: &Path) -> Result<Self, String> {
        let about = |e: String| format!("QEMU at {}: {e}", socket.display());
        Self::greeted(socket).map_err(about)
    }

    fn greeted(socket: &Path) -> Result<Self, String> {
        let writer = UnixStream::connect(socket).map_err(text)?;
        writer.set_read_timeout(Some(TIMEOUT)).map_err(text)?;
        let lines = BufReader::new(writer.try_clone().map_err(text)?).lines();
        let mut qmp = Self {
            writer,
            lines,
            count: 0,
        };
        // It greets first.
        qmp.line()?;
        qmp.run("qmp_capabilities")?;
        Ok(qmp)
    }

    /// Has QEMU carry out a command without arguments. Returns what it says.
    ///
    /// # Errors
    ///
    /// Why it does not, or that it does not answer.
    pub(crate) fn run(&mut self, command: &str) -> Result<Value, String> {
        self.count += 1;
        let id = json!(self.count);
        writeln!(&self.writer, "{}", json!({ "execute": command, "id": id })).map_err(text)?;
        loop {
            let answer: Value = serde_json::from_str(&self.line()?)
                .map_err(|e| format!("its answer is not understood: {e}"))?;
            // Events come in between, and answers that nobody waited for any longer. An error may have no id.
            if answer.get("id").is_some_and(|of| *of != id) {
                continue;
            }
            if let Some(error) = answer.get("error") {
                return Err(format!("{command} is refused: {error}"));
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }

    fn line(&mut self) -> Result<String, String> {
        match self.lines.next() {
            Some(Ok(line)) => Ok(line),
            Some(Err(e)) if e.kind() == io::ErrorKind::WouldBlock => Err(format!(
                "no answer for {} s; it serves one client at a time",
                TIMEOUT.as_secs()
            )),
            Some(Err(e)) => Err(text(e)),
            None => Err("it closed the connection".to_owned()),
        }
    }
}

fn text(error: io::Error) -> String {
    error.to_string()
}
