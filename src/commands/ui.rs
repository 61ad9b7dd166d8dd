//! `narrows ui`: serves a page on which the plan follows the controls.

use std::net::{Ipv4Addr, TcpListener};

use crate::args::UiArgs;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::signals::stop_on_signals;
use crate::ui::{FIRST_MODEL, PageSettings, serve};

/// Opens the port, prints the address, serves until Ctrl-C.
pub fn run(args: &UiArgs) -> CommandResult<()> {
    let (model, hardware) = args.inputs(FIRST_MODEL)?;
    let settings = PageSettings {
        model,
        hardware,
        time_limit: args.planning.request.time_limit,
        flags: args.typed.clone(),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port));
    let listener = listener.map_err(|error| cannot_listen(args.port, &error))?;
    let address = listener.local_addr().map_err(|error| cannot_listen(args.port, &error))?;
    let stop = stop_on_signals("Ctrl-C will end the server at once");
    serve(listener, settings, &stop, || {
        output::print(&format!("Serving http://{address}/ to this machine; Ctrl-C ends it\n"))
    })
}

fn cannot_listen(port: u16, error: &std::io::Error) -> Failure {
    let message = format!("127.0.0.1:{port} cannot be opened: {error}");
    Failure::input(Problem::new("--port", message).hint("--port 0, which takes any free port"))
}
