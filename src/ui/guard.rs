//! Requests that are answered: those of this page on this machine.
//!
//! The server listens on the loopback address only. Pages of other sites can still make a browser send requests to it,
//! and a name that they own may resolve to it (DNS rebinding), so that `Host` and `Origin` must name this server.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::settings::refusal;

/// Names of this machine that a browser may use.
const NAMES: [&str; 3] = ["127.0.0.1", "localhost", "[::1]"];

/// The page loads its own files only, and no other page embeds it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Answers a request if it is meant for the server on this port; adds headers to the answer.
pub async fn guard(State(port): State<u16>, request: Request, next: Next) -> Response {
    let mut response = match is_own(request.headers(), port) {
        true => next.run(request).await,
        false => {
            let message = "this server answers its own page at 127.0.0.1 only";
            (StatusCode::FORBIDDEN, refusal(message)).into_response()
        }
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether the host is this server, and so is the origin where there is one.
fn is_own(headers: &HeaderMap, port: u16) -> bool {
    // Clients leave out the default port of HTTP.
    let is_port = |text: &str| text == format!(":{port}") || text.is_empty() && port == 80;
    let names_server =
        |host: &str| NAMES.iter().any(|name| host.strip_prefix(name).is_some_and(is_port));
    let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let hosts: Vec<String> = headers.get_all(HOST).iter().map(text).collect();
    let mut origins = headers.get_all(ORIGIN).iter().map(text);
    matches!(&hosts[..], [host] if names_server(host))
        && origins.all(|origin| origin.strip_prefix("http://").is_some_and(names_server))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_and_origins_are_refused() {
        let (own, other) = ("127.0.0.1:8080", "evil.example:8080");
        for (hosts, origin, expected) in [
            (&[own][..], None, true),
            (&["localhost:8080"], Some("http://localhost:8080"), true),
            (&["[::1]:8080"], None, true),
            (&[], None, false),
            (&[own, other], None, false),
            (&[other], None, false),
            (&["127.0.0.1:80"], None, false),
            (&["127.0.0.1"], None, false),
            (&["127.0.0.1:8080.evil.example"], None, false),
            (&[own], Some("http://evil.example:8080"), false),
            (&[own], Some("https://127.0.0.1:8080"), false),
            (&[own], Some("http://127.0.0.1:9090"), false),
            (&[own], Some("null"), false),
        ] {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(HOST, HeaderValue::from_static(host));
            }
            if let Some(origin) = origin {
                headers.insert(ORIGIN, HeaderValue::from_static(origin));
            }
            assert_eq!(is_own(&headers, 8080), expected, "{hosts:?} {origin:?}");
        }
    }

    #[test]
    fn the_default_port_may_be_left_out() {
        for (host, expected) in [("127.0.0.1", true), ("127.0.0.1:80", true), ("127.0.0.12", false)]
        {
            let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
            assert_eq!(is_own(&headers, 80), expected, "{host}");
        }
    }
}
