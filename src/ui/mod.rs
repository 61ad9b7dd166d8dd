//! The page of `narrows ui`: a plan that follows the controls, served to this machine only.
//!
//! | file | contents |
//! |---|---|
//! | `server.rs` | routes, and how newer requests replace older ones |
//! | `guard.rs` | which requests are answered, and the headers of answers |
//! | `controls.rs` | the controls of the page, and the presets that they offer |
//! | `settings.rs` | the request that settings describe, and why one is refused |
//! | `answer.rs` | the plan of a request, and the baselines beside it |
//! | `assets/` | the page itself, which needs no network |
//!
//! | request | answer |
//! |---|---|
//! | `GET /api/options` | presets, controls, and the settings that the page begins with |
//! | `POST /api/fields` | the fields that `whatif --list` names, for a model and hardware |
//! | `POST /api/plan` | the fastest plan, as `plan --format json` prints it, with pictures and a report in HTML |
//! | `POST /api/baselines` | the baselines of `explain` and pure data parallelism, with a picture of their step times |
//!
//! `POST` takes `{"settings": {FIELD: VALUE, …}}` with the fields of `whatif --sweep`, for `/api/plan` also
//! `"time_limit_s"`. Fields that are left out have their defaults, whatever the flags of the command line; model and
//! hardware are then those of the command line. Settings that cannot be planned are answered by `{"error": {"kind", "problems"}}`, with the status 200.

mod answer;
mod controls;
mod guard;
mod server;
mod settings;

pub use controls::MODEL as FIRST_MODEL;
pub use server::serve;
pub use settings::PageSettings;
