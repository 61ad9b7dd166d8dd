//! `torch_step.py` as a process that runs one step for each line on its standard input.

use std::error::Error;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::times::Times;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/step/torch_step.py");

/// Execution mode of PyTorch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Eager,
    Compile,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Eager => "eager",
            Mode::Compile => "compile",
        })
    }
}

/// The process of PyTorch.
pub struct Torch {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub parameters: u64,
    pub version: String,
}

impl Torch {
    /// Starts PyTorch on batches of (sequences, length) with the weights and tokens of the file `start`.
    pub fn start(
        python: &str,
        mode: Mode,
        threads: usize,
        (sequences, length): (u64, u64),
        start: &Path,
    ) -> Result<Torch, Box<dyn Error>> {
        let mut process = Command::new(python)
            .args([SCRIPT, &mode.to_string(), "--threads", &threads.to_string()])
            .args(["--sequences", &sequences.to_string(), "--length", &length.to_string()])
            .arg("--start")
            .arg(start)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{python}: {error}"))?;
        let stdin = process.stdin.take().ok_or("no input")?;
        let stdout = BufReader::new(process.stdout.take().ok_or("no output")?);
        let mut torch = Torch { process, stdin, stdout, parameters: 0, version: String::new() };
        let first = torch.line().map_err(|_| format!("{python} cannot import torch"))?;
        let (parameters, version) =
            first.split_once(' ').ok_or("unexpected output of torch_step.py")?;
        torch.parameters = parameters.parse()?;
        torch.version = version.trim().to_string();
        Ok(torch)
    }

    /// Runs one step.
    pub fn step(&mut self, learning_rate: f64) -> Result<Times, Box<dyn Error>> {
        writeln!(self.stdin, "{learning_rate}")?;
        let line = self.line()?;
        let values: Vec<f64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        match values[..] {
            [wall_s, processor_s, loss] => Ok(Times { wall_s, processor_s, loss }),
            _ => Err(format!("unexpected output of torch_step.py: {line}").into()),
        }
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        match self.stdout.read_line(&mut line)? {
            0 => Err("torch_step.py ended".into()),
            _ => Ok(line),
        }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // The process is waiting for the next line.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
