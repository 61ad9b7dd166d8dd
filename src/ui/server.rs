//! The server: routes, and how newer requests replace older ones.
//!
//! One search runs at a time, since each uses all cores. The page drops the connection of a request that it no longer
//! needs; the search of that request then ends, and one that waits never starts.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::answer::Planner;
use super::controls::options;
use super::guard::guard;
use super::settings::{ErrorReport, PageSettings, Settings, refusal};
use crate::errors::{CommandResult, Failure, Problem};
use crate::report::SORT_SCRIPT;

/// Most bytes of a request.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Time between two looks at the signal that ends the server.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

const ASSETS: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("assets/index.html")),
    ("/app.js", "text/javascript; charset=utf-8", include_str!("assets/app.js")),
    ("/sort.js", "text/javascript; charset=utf-8", SORT_SCRIPT),
    ("/style.css", "text/css; charset=utf-8", include_str!("assets/style.css")),
];

struct Server {
    settings: PageSettings,
    options: Value,
    planner: Arc<Planner>,
    /// Held by the search that runs.
    turn: Arc<Mutex<()>>,
}

/// Body of a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    settings: Settings,
    /// Wall time after which the search ends with the best plan so far.
    #[serde(default)]
    time_limit_s: Option<f64>,
}

/// Ends a search when the request that needs it is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Serves the page until `stop` is set. `announce` is called once requests are answered.
///
/// # Errors
/// Model or hardware of the command line cannot be read, flags that cannot be planned with, and failures of the listener.
pub fn serve(
    listener: TcpListener,
    settings: PageSettings,
    stop: &AtomicBool,
    announce: impl FnOnce() -> CommandResult<()>,
) -> CommandResult<()> {
    let failed = |error: std::io::Error| {
        Failure::failed(vec![Problem::new("", format!("the server failed: {error}"))])
    };
    let port = listener.local_addr().map_err(failed)?.port();
    let options = options(&settings)?;
    let server = Server { settings, options, planner: Arc::default(), turn: Arc::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    announce()?;
    let result = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let server = axum::serve(listener, router(server, port));
        let server = tokio::spawn(server.into_future());
        while !stop.load(Ordering::Relaxed) && !server.is_finished() {
            tokio::time::sleep(SIGNAL_INTERVAL).await;
        }
        match server.is_finished() {
            true => server.await?,
            false => Ok(()),
        }
    });
    // Searches that still run are not waited for.
    runtime.shutdown_background();
    result.map_err(failed)
}

fn router(server: Server, port: u16) -> Router {
    let mut router = Router::new();
    for (path, kind, text) in ASSETS {
        router = router.route(path, get(move || async move { ([(CONTENT_TYPE, kind)], text) }));
    }
    router
        .route("/api/options", get(answer_options))
        .route("/api/fields", post(answer_fields))
        .route("/api/plan", post(answer_plan))
        .route("/api/baselines", post(answer_baselines))
        .fallback(|| async { (StatusCode::NOT_FOUND, refusal("there is no such page")) })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn_with_state(port, guard))
        .with_state(Arc::new(server))
}

type Body = Result<Json<Query>, JsonRejection>;

async fn answer_options(State(server): State<Arc<Server>>) -> Response {
    Json(server.options.clone()).into_response()
}

async fn answer_fields(State(server): State<Arc<Server>>, body: Body) -> Response {
    let answer = |query: Query| {
        let fields = server.settings.fields(&query.settings)?;
        let field = |(name, help): (String, String)| json!({"name": name, "help": help});
        Ok(json!({"fields": fields.into_iter().map(field).collect::<Vec<_>>()}))
    };
    respond(body.map(|Json(query)| answer(query)))
}

async fn answer_plan(State(server): State<Arc<Server>>, body: Body) -> Response {
    let search = |planner: &Planner, server: &Server, query: Query, stop: &Arc<AtomicBool>| {
        let point = server.settings.point(&query.settings)?;
        planner.plan(&query.settings, point, query.time_limit_s, stop)
    };
    in_turn(server, body, search).await
}

async fn answer_baselines(State(server): State<Arc<Server>>, body: Body) -> Response {
    let search = |planner: &Planner, server: &Server, query: Query, stop: &Arc<AtomicBool>| {
        let point = server.settings.point(&query.settings)?;
        planner.baselines(&query.settings, point, stop)
    };
    in_turn(server, body, search).await
}

/// Answers by a search, once no other search runs, unless the request is dropped before.
async fn in_turn(
    server: Arc<Server>,
    body: Body,
    search: impl FnOnce(&Planner, &Server, Query, &Arc<AtomicBool>) -> CommandResult<Value>
    + Send
    + 'static,
) -> Response {
    let query = match body {
        Ok(Json(query)) => query,
        Err(rejection) => return respond(Err(rejection)),
    };
    let stop = StopOnDrop(Arc::default());
    let turn = Arc::clone(&server.turn).lock_owned().await;
    let flag = Arc::clone(&stop.0);
    let task = move || {
        let answer = search(&server.planner, &server, query, &flag);
        drop(turn);
        answer
    };
    match tokio::task::spawn_blocking(task).await {
        Ok(answer) => respond(Ok(answer)),
        Err(_) => {
            let message = "the search failed; the terminal has the reason";
            (StatusCode::INTERNAL_SERVER_ERROR, refusal(message)).into_response()
        }
    }
}

fn respond(answer: Result<CommandResult<Value>, JsonRejection>) -> Response {
    match answer {
        Ok(Ok(answer)) => Json(answer).into_response(),
        // No error of HTTP, which browsers would log as one of the page.
        Ok(Err(failure)) => Json(ErrorReport::from(failure)).into_response(),
        Err(rejection) => (rejection.status(), refusal(rejection.body_text())).into_response(),
    }
}
