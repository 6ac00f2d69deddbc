// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0

//! A small client of QEMU's machine protocol.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::process::poll;

/// How long QEMU may take for an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long it may take to listen after it was started.
const LISTEN: Duration = Duration::from_secs(20);
/// The longest line it may send, in bytes.
const LINE_MAX: usize = 16 << 20;

/// A connection on which commands may be given.
#[derive(Debug)]
pub struct Qmp {
    write: UnixStream,
    read: BufReader<UnixStream>,
    next: u64,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects to the socket at `path` and leaves the negotiation mode.
    ///
    /// # Errors
    ///
    /// If nobody listens there, or will before long, or it is not QEMU.
    pub fn connect(path: &Path) -> Result<Self> {
        // A QEMU that has just been started is not there yet.
        let mut why = None;
        let stream = poll(LISTEN, || match UnixStream::connect(path) {
            Ok(stream) => Some(stream),
            Err(e) => {
                why = Some(e);
                None
            }
        });
        let stream = stream.with_context(|| format!("QMP at {}: {why:?}", path.display()))?;
        Self::over(stream)
    }

    fn over(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        let mut this = Self {
            write: stream.try_clone()?,
            read: BufReader::new(stream),
            next: 1,
            events: Vec::new(),
        };
        let greeting = this.line()?;
        ensure!(greeting.get("QMP").is_some(), "no QMP greeting: {greeting}");
        this.execute("qmp_capabilities", &json!({}))?;
        Ok(this)
    }

    /// Gives a command and waits for its answer.
    ///
    /// # Errors
    ///
    /// If QEMU refuses it, does not answer, or answers something else.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let id = self.next;
        self.next += 1;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.write
            .write_all(line.as_bytes())
            .context("write to QMP")?;
        loop {
            let mut answer = self
                .line()
                .with_context(|| format!("the answer to {command}"))?;
            if answer.get("event").is_some() {
                self.events.push(answer);
                continue;
            }
            ensure!(
                answer.get("id").and_then(Value::as_u64) == Some(id),
                "{command}: an answer to something else: {answer}"
            );
            if let Some(error) = answer.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("refused"));
            }
            return answer
                .get_mut("return")
                .map(Value::take)
                .with_context(|| format!("{command}: neither return nor error: {answer}"));
        }
    }

    /// Sets the memory the guest is to keep, in bytes: QEMU counts from the other end.
    ///
    /// # Errors
    ///
    /// As [`Qmp::execute`].
    pub fn balloon(&mut self, keep: u64) -> Result<()> {
        self.execute("balloon", &json!({ "value": keep })).map(drop)
    }

    /// The memory the guest has, in bytes, as the balloon's `actual` says.
    ///
    /// # Errors
    ///
    /// As [`Qmp::execute`].
    pub fn query_balloon(&mut self) -> Result<u64> {
        let answer = self.execute("query-balloon", &json!({}))?;
        answer["actual"]
            .as_u64()
            .with_context(|| format!("query-balloon: {answer}"))
    }

    /// Takes the events that came so far.
    pub fn events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        loop {
            let chunk = self.read.fill_buf().context("read from QMP")?;
            ensure!(!chunk.is_empty(), "QEMU has closed its QMP socket");
            let end = chunk.iter().position(|&b| b == b'\n');
            let n = end.map_or(chunk.len(), |at| at + 1);
            line.extend_from_slice(&chunk[..n]);
            self.read.consume(n);
            ensure!(line.len() <= LINE_MAX, "QEMU sends a line without end");
            if end.is_some() {
                let text = String::from_utf8_lossy(&line);
                return serde_json::from_slice(&line).with_context(|| format!("no JSON: {text:?}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays QEMU: sends the lines, and reads and drops what comes.
    fn qemu(lines: &'static [&'static str]) -> Result<Qmp> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut write = theirs.try_clone().unwrap();
        std::thread::spawn(move || {
            for line in lines {
                write.write_all(line.as_bytes()).unwrap();
                write.write_all(b"\r\n").unwrap();
            }
            std::io::copy(&mut { theirs }, &mut std::io::sink()).unwrap();
        });
        Qmp::over(ours)
    }

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;
    const READY: &str = r#"{"return": {}, "id": 1}"#;

    #[test]
    fn events_are_kept_beside_answers() {
        let mut qmp = qemu(&[
            GREETING,
            READY,
            r#"{"event": "BALLOON_CHANGE", "data": {"actual": 5}}"#,
            r#"{"return": {"actual": 1073741824}, "id": 2}"#,
            r#"{"error": {"class": "X", "desc": "No balloon device"}, "id": 3}"#,
            r#"{"return": {}, "id": 99}"#,
        ])
        .unwrap();
        assert_eq!(qmp.query_balloon().unwrap(), 1 << 30);
        assert_eq!(qmp.events().len(), 1);
        let why = qmp.balloon(1).unwrap_err().to_string();
        assert_eq!(why, "balloon: No balloon device");
        assert!(
            qmp.balloon(1)
                .unwrap_err()
                .to_string()
                .contains("something else")
        );
    }

    #[test]
    fn what_is_not_qemu_is_refused() {
        assert!(qemu(&[r#"{"hello": 1}"#]).is_err());
        assert!(qemu(&["nonsense"]).is_err());
    }
}
