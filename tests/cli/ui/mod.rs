//! `narrows ui`: the server and its page.

mod browser;
mod server;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::CACHE;

/// A running `narrows ui`, killed when dropped.
struct Server {
    child: Child,
    port: u16,
    /// Kept open, so that the server can print.
    _stdout: BufReader<ChildStdout>,
}

/// An answer of the server.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Server {
    fn start(arguments: &str) -> Server {
        let mut child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
            .arg("ui")
            .args(arguments.split_whitespace())
            .env("XDG_CACHE_HOME", CACHE)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        let port = line.split("http://127.0.0.1:").nth(1).and_then(|rest| rest.split('/').next());
        let port = port.and_then(|port| port.parse().ok());
        let port = port.unwrap_or_else(|| panic!("no address in `{line}`"));
        Server { child, port, _stdout: stdout }
    }

    /// The answer to a request with these lines in its head.
    fn answer(&self, request: &str, headers: &[&str], body: &str) -> Answer {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        let mut head = vec![format!("{request} HTTP/1.1"), "Connection: close".into()];
        head.extend(headers.iter().map(|header| header.to_string()));
        head.push(format!("Content-Length: {}", body.len()));
        write!(stream, "{}\r\n\r\n{body}", head.join("\r\n")).expect("a request");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    fn host(&self) -> String {
        format!("Host: 127.0.0.1:{}", self.port)
    }

    fn get(&self, path: &str) -> Answer {
        self.answer(&format!("GET {path}"), &[&self.host()], "")
    }

    /// The status and the JSON answer to a request with this JSON body.
    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let headers = [&*self.host(), "Content-Type: application/json"];
        let answer = self.answer(&format!("POST {path}"), &headers, &body.to_string());
        (answer.status, serde_json::from_str(&answer.body).expect("JSON"))
    }

    /// The settings that the page begins with, and others that replace them.
    fn settings(&self, others: Value) -> Value {
        let options: Value = serde_json::from_str(&self.get("/api/options").body).expect("JSON");
        let mut settings = options["settings"].clone();
        let others = others.as_object().expect("settings").clone();
        settings.as_object_mut().expect("settings").extend(others);
        settings
    }

    fn interrupt(&self) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args(["-INT", &id]).status().expect("kill runs");
        assert!(status.success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
