//! The page in headless Chromium, driven by the DevTools protocol over a pair of pipes.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Server;

const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Longest wait for the page.
const PATIENCE: Duration = Duration::from_secs(120);

/// A browser with one page.
struct Browser {
    child: Child,
    requests: File,
    answers: BufReader<File>,
    calls: u64,
    session: Option<String>,
    events: VecDeque<Value>,
}

impl Browser {
    /// A browser with its profile in `folder`; `None` where none is installed.
    fn start(folder: &Path) -> Option<Browser> {
        let is_installed = |program: &&str| {
            let mut version = Command::new(program);
            version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            version.status().is_ok_and(|status| status.success())
        };
        let program = PROGRAMS.into_iter().find(is_installed)?;
        let pipes = ["requests", "answers"].map(|name| folder.join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().expect("mkfifo runs").success());
        // The protocol reads from descriptor 3 and writes to descriptor 4. The server is local, and containers lack what
        // the sandbox needs.
        let script = "exec \"$0\" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
             --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<\"$2\" 4>\"$3\"";
        let child = Command::new("sh")
            .args(["-c", script, program])
            .arg(folder.join("profile"))
            .args(&pipes)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh runs");
        let requests = OpenOptions::new().write(true).open(&pipes[0]).expect("a pipe");
        let answers = BufReader::new(File::open(&pipes[1]).expect("a pipe"));
        let mut browser =
            Browser { child, requests, answers, calls: 0, session: None, events: VecDeque::new() };
        let page = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": page["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", target);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        write!(self.requests, "{message}\0").expect("the browser reads");
        loop {
            let mut text = vec![];
            self.answers.read_until(0, &mut text).expect("the browser answers");
            let text = text.strip_suffix(&[0]).expect("the browser runs");
            let mut answer: Value = serde_json::from_slice(text).expect("JSON");
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push_back(answer);
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    fn text(&mut self, expression: &str) -> String {
        self.value(expression).as_str().expect("a text").to_owned()
    }

    /// Waits until an expression is true.
    fn wait(&mut self, expression: &str) {
        let begin = Instant::now();
        while self.value(expression) != true {
            assert!(begin.elapsed() < PATIENCE, "never: {expression}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait_for_plan(&mut self) {
        self.wait("document.body?.dataset.state === 'ready'");
    }

    fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let code = if key == "ArrowRight" { 39 } else { 9 };
            let event =
                json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Errors of scripts and of the console, and messages of the console.
    fn messages(&mut self) -> Vec<Value> {
        self.value("1");
        let methods = ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"];
        let is_message = |event: &Value| methods.iter().any(|method| event["method"] == *method);
        self.events.drain(..).filter(is_message).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A page that a command writes: without a network, on a narrow screen, with tables that are sorted by a click.
#[test]
fn a_written_page_is_narrow_and_sorted() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(mut browser) = Browser::start(folder.path()) else {
        println!("skipped: none of {PROGRAMS:?} is installed");
        return;
    };
    let page = folder.path().join("page.html");
    crate::stdout(&format!("validate --report {}", page.display()));
    let width = json!({"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": true});
    browser.call("Emulation.setDeviceMetricsOverride", width);
    browser.call("Page.navigate", json!({"url": format!("file://{}", page.display())}));
    browser.wait("document.readyState === 'complete' && document.querySelector('table') !== null");
    assert_eq!(browser.value("document.documentElement.scrollWidth"), 360);
    assert_eq!(browser.value("performance.getEntriesByType('resource').length"), 0);
    let sorted = "(() => { \
        const table = [...document.querySelectorAll('table')].find(t => /measured/.test(t.tHead.textContent)); \
        const titles = [...table.querySelectorAll('th button')]; \
        const column = titles.findIndex(title => title.textContent === 'measured'); \
        titles[column].click(); \
        const cells = [...table.tBodies[0].rows].map(row => parseFloat(row.cells[column].textContent)); \
        return cells.length > 2 && cells.every((cell, index) => index === 0 || cells[index - 1] <= cell); \
    })()";
    assert_eq!(browser.value(sorted), true);
    let values = "value('0.000 s') < value('<0.001 s') && value('<0.001 s') < value('1.0 ms') && \
        value('-2.0 ms') < value('0.0 ms') && value('no plan (1)') === null";
    assert_eq!(browser.value(values), true);
    let messages = browser.messages();
    assert!(messages.is_empty(), "{messages:#?}");
}

#[test]
fn the_page_follows_its_controls() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(mut browser) = Browser::start(folder.path()) else {
        println!("skipped: none of {PROGRAMS:?} is installed");
        return;
    };
    let server = Server::start("--model cola-60m --devices 2 --sequence-length 512");
    let address = format!("http://127.0.0.1:{}/", server.port);
    browser.call("Page.navigate", json!({"url": address}));
    browser.wait_for_plan();
    let status = "document.getElementById('status').textContent";
    let highlights = "document.getElementById('highlights').textContent";
    let (first_status, first_plan) = (browser.text(status), browser.text(highlights));
    assert!(first_status.starts_with("cola-60m on 2 devices of a100-80gb: "), "{first_status}");

    // The keyboard moves a slider; the plan follows, and so do its pictures and the baselines.
    browser.value("document.querySelector('[aria-label=\"Devices, slider\"]').focus()");
    browser.press("ArrowRight");
    browser.wait(&format!("{status}.startsWith('cola-60m on 4 devices ')"));
    browser.wait_for_plan();
    let (moved_status, moved_plan) = (browser.text(status), browser.text(highlights));
    assert_ne!(moved_plan, first_plan);
    assert_eq!(browser.text("document.getElementById('field-devices').value"), "4");
    let baselines = browser.text("document.getElementById('baselines').textContent");
    for baseline in ["pure data parallelism", "btp, tensor axis "] {
        assert!(baselines.contains(baseline), "{baselines}");
    }
    let figures = browser.value("document.querySelectorAll('#figures svg').length");
    assert!(figures.as_u64() >= Some(2), "{figures}");

    // The address restores the state.
    let link = browser.text("location.href");
    assert!(link.contains("devices=4"), "{link}");
    browser.call("Page.navigate", json!({"url": "about:blank"}));
    browser.call("Page.navigate", json!({"url": link}));
    browser.wait_for_plan();
    assert_eq!((browser.text(status), browser.text(highlights)), (moved_status, moved_plan));

    // Of many moves the last one counts.
    browser.value(
        "for (const stop of [5, 1, 4, 0]) { const slider = \
         document.querySelector('[aria-label=\"Devices, slider\"]'); slider.value = stop; \
         slider.dispatchEvent(new Event('input')); }",
    );
    browser.wait("document.body.dataset.state !== 'ready'");
    browser.wait_for_plan();
    assert!(browser.text(status).starts_with("cola-60m on 1 device of"));

    // A flag of the command line that is replaced by the value of the preset, or emptied, no longer holds.
    let link = format!(
        "{address}#model=cola-60m&hardware=a100-80gb&devices=2&sequence_length=512&tensor=2"
    );
    browser.call("Page.navigate", json!({"url": "about:blank"}));
    browser.call("Page.navigate", json!({"url": link}));
    browser.wait_for_plan();
    let shown = browser.text("document.getElementById('extras').textContent");
    assert!(shown.starts_with("tensor = 2"), "{shown}");
    let first_plan = browser.text(highlights);
    for (id, text) in [("devices", "1"), ("sequence_length", "1024"), ("sequence_length", "")] {
        browser.value(&format!(
            "(() => {{ const field = document.getElementById('field-{id}'); field.value = '{text}'; \
             field.dispatchEvent(new Event('input')); }})()"
        ));
    }
    browser.value("document.querySelector('#extras button').click()");
    browser.wait("document.body.dataset.state !== 'ready'");
    browser.wait_for_plan();
    assert_ne!(browser.text(highlights), first_plan);
    assert_eq!(browser.text("document.getElementById('field-sequence_length').value"), "4096");
    let link = browser.text("location.href");
    assert!(!link.contains("sequence_length") && !link.contains("tensor"), "{link}");

    // Every control has a name and can be reached by the keyboard.
    let unnamed = "[...document.querySelectorAll('input, select')].filter(control => \
        !control.labels?.length && !control.ariaLabel || control.tabIndex < 0).length";
    assert_eq!(browser.value(unnamed), 0);
    browser.value("document.getElementById('model').focus()");
    browser.press("Tab");
    assert_eq!(browser.text("document.activeElement.id"), "hardware");

    // Nothing is wider than a narrow screen; dark pages have light ink.
    let width =
        |width: u32| json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": true});
    browser.call("Emulation.setDeviceMetricsOverride", width(360));
    assert_eq!(browser.value("document.documentElement.scrollWidth <= 360"), true);
    let mut colours = vec![];
    for scheme in ["light", "dark"] {
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        browser.call("Emulation.setEmulatedMedia", json!({"features": [feature]}));
        let styles = [
            ("document.body", "backgroundColor"),
            ("document.body", "color"),
            ("document.querySelector('#figures svg')", "filter"),
        ];
        colours.push(styles.map(|(element, property)| {
            browser.text(&format!("getComputedStyle({element}).{property}"))
        }));
    }
    assert!(colours[0].iter().zip(&colours[1]).all(|(light, dark)| light != dark), "{colours:?}");

    // A value that makes no plan is explained, which is no error of the page.
    browser.call("Page.navigate", json!({"url": format!("{address}#devices=0")}));
    browser.wait("document.body.dataset.state === 'failed'");
    let problem = browser.text("document.getElementById('problem').textContent");
    assert!(problem.contains("devices: 0 is not between 1 and"), "{problem}");
    let messages = browser.messages();
    assert!(messages.is_empty(), "{messages:#?}");

    // Texts of a picture that is wider than the screen stay readable.
    browser.call("Page.navigate", json!({"url": format!("{address}#model=lax-60m&devices=1")}));
    browser.wait("document.querySelector('[data-kind=block] svg') !== null");
    let shrunk = "(() => { const svg = document.querySelector('[data-kind=block] svg'); \
        return svg.getBoundingClientRect().width / svg.getAttribute('width'); })()";
    assert!(browser.value(shrunk).as_f64() >= Some(0.74), "{}", browser.value(shrunk));
}
