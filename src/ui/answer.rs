//! Answers of the server: the plan of a request, and the baselines beside it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use narrows_plan::{Bytes, Seconds};
use narrows_planner::{
    FeasiblePlan, Request, SearchCache, SearchResult, SearchStatus, baseline_requests, diagnose,
    search_until_stopped,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::settings::Settings;
use crate::args::{Detail, validate};
use crate::errors::{CommandResult, Failure, Problem};
use crate::plot::Figure;
use crate::priced_plan::PricedPlan;
use crate::report::{
    BaselinePlan, BaselinesReport, InfeasibleReport, PlanReport, Report, html_fragment,
};
use crate::step_cost::StepCost;
use crate::text::{interval_90, mesh_and_schedule, percent, plan_phrase, thousands};
use crate::whatif::Point;

/// Searches with a cache that all requests share.
#[derive(Default)]
pub struct Planner {
    cache: SearchCache,
    /// The last search that ended without a limit.
    last: Mutex<Option<(PageRequestKey, Arc<SearchResult>)>>,
}

/// Inputs of a search: the settings, and the content of the files that they name, which may be edited meanwhile.
#[derive(PartialEq)]
struct PageRequestKey {
    settings: Settings,
    /// Fingerprint of the model.
    model: String,
    /// Fingerprint of the hardware profile.
    profile: String,
}

/// A figure as the page shows it.
#[derive(Serialize)]
struct PageFigure {
    /// Name of its kind.
    kind: String,
    caption: String,
    svg: String,
}

/// A result in large print.
#[derive(Serialize)]
struct Highlight {
    name: &'static str,
    value: String,
    note: String,
}

impl Planner {
    /// The fastest plan of a point: `decisions`, `prediction` and `search` as `plan --format json` prints them, with
    /// `title`, `verdict`, `highlights`, `figures` as SVG, and the text report in HTML as `details`. `decisions` is `null`
    /// if the time limit passed before a plan was found.
    ///
    /// # Errors
    /// An invalid request, and a request without a plan.
    pub fn plan(
        &self,
        settings: &Settings,
        point: Point,
        time_limit_s: Option<f64>,
        stop: &Arc<AtomicBool>,
    ) -> CommandResult<Value> {
        let limits = [time_limit_s.map(time_limit).transpose()?, point.request.time_limit];
        let request = Request { time_limit: limits.into_iter().flatten().min(), ..point.request };
        validate(&request)?;
        let result = self.search(settings, &request, stop);
        let Some(best) = &result.best else {
            let report = InfeasibleReport::new(&request, &result.report, &self.cache);
            return match result.report.status {
                SearchStatus::TimeLimit if time_limit_s.is_some() => json_value(&report),
                _ => Err(report.into_failure()),
            };
        };
        let priced = PricedPlan::of_search(&request, best.clone())?;
        let run = priced.training_run(point.training_run.as_ref())?;
        let report = PlanReport::new(&request.model, &priced, request.arena_limit());
        let cost = point.reports_cost.then(|| {
            let (mesh, step_time_s) = (priced.plan.mesh, priced.prediction.step_time_s);
            StepCost::new(&request, mesh, step_time_s, point.price_per_device_hour)
        });
        let report = report.with_search(&result.report).with_step_cost(cost).with_training_run(run);
        let mut answer = json_value(&report)?;
        answer["title"] = json!(report.title());
        answer["verdict"] = json!(report.verdict());
        answer["highlights"] = json_value(&highlights(&request, &priced))?;
        answer["figures"] = figures(report.figures(&request.profile))?;
        answer["details"] = json!(html_fragment(&report.page(Detail::Full)));
        Ok(answer)
    }

    /// The baselines to which the plan of a point is compared: `baselines`, and a picture of their step times.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn baselines(
        &self,
        settings: &Settings,
        point: Point,
        stop: &Arc<AtomicBool>,
    ) -> CommandResult<Value> {
        let request = point.request;
        validate(&request)?;
        let result = self.search(settings, &request, stop);
        let Some(best) = &result.best else {
            return Err(InfeasibleReport::new(&request, &result.report, &self.cache).into_failure());
        };
        let chosen = PricedPlan::of_search(&request, best.clone())?;
        let mut plans = vec![];
        for (name, baseline) in compared_requests(&request, best) {
            let result = search_until_stopped(&baseline, &self.cache, stop);
            if stop.load(Ordering::Relaxed) {
                break;
            }
            plans.push(match result.best {
                Some(plan) => {
                    let PricedPlan { plan, prediction, .. } =
                        PricedPlan::of_search(&baseline, plan)?;
                    let (plan, prediction) = (Box::new(plan), Box::new(prediction));
                    BaselinePlan::Planned { name, plan, prediction }
                }
                None => {
                    let reasons =
                        diagnose(&baseline, &result.report, &self.cache).clauses().join("; ");
                    BaselinePlan::Impossible { name, reason: reasons }
                }
            });
        }
        let report = BaselinesReport::new(&chosen, &plans);
        let mut answer = json_value(&report)?;
        answer["figures"] = figures(report.figures())?;
        answer["details"] = json!(html_fragment(&report.page(Detail::Full)));
        Ok(answer)
    }

    /// Searches, unless the last search had the same settings, model and hardware.
    fn search(
        &self,
        settings: &Settings,
        request: &Request,
        stop: &Arc<AtomicBool>,
    ) -> Arc<SearchResult> {
        let key = PageRequestKey {
            settings: settings.clone(),
            model: request.model.fingerprint(),
            profile: request.profile.fingerprint().to_owned(),
        };
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, result)) = &*last()
            && *known == key
        {
            return Arc::clone(result);
        }
        let result = Arc::new(search_until_stopped(request, &self.cache, stop));
        if result.report.status != SearchStatus::TimeLimit {
            *last() = Some((key, Arc::clone(&result)));
        }
        result
    }
}

/// Requests for pure data parallelism and for the published baselines, with their names.
fn compared_requests(request: &Request, best: &FeasiblePlan) -> Vec<(String, Request)> {
    let replicas =
        Request { tensor: Some(1), pipeline: Some(1), data: None, ..request.beside(best) };
    let mut requests = vec![("pure data parallelism".to_owned(), replicas)];
    requests.extend(baseline_requests(request, best));
    requests
}

fn time_limit(seconds: f64) -> CommandResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| {
        let problem = Problem::new("time_limit_s", error.to_string());
        Failure::input(problem.hint("a number of seconds such as 0.25"))
    })
}

fn highlights(request: &Request, priced: &PricedPlan) -> Vec<Highlight> {
    let PricedPlan { plan, prediction, .. } = priced;
    let interval_s = prediction.step_time_interval_s;
    let peak = prediction.peak_memory();
    let limit = request.arena_limit();
    let room = match limit {
        Bytes(u64::MAX) => "no limit".to_owned(),
        limit => format!("{} of {limit}", percent(peak.as_f64() / limit.as_f64())),
    };
    let highlight = |name, value, note| Highlight { name, value, note };
    vec![
        highlight("Plan", plan_phrase(plan), mesh_and_schedule(plan)),
        highlight(
            "Step time",
            Seconds(prediction.step_time_s).to_string(),
            interval_90(interval_s, interval_s.map(Seconds)),
        ),
        highlight(
            "Tokens per second",
            thousands(prediction.tokens_per_s.round() as u64),
            format!("MFU {}", percent(prediction.mfu)),
        ),
        highlight("Memory of a device", peak.to_string(), room),
    ]
}

fn figures(figures: Vec<Figure>) -> CommandResult<Value> {
    let page_figure = |Figure { kind, picture, caption }: Figure| {
        Ok(PageFigure { kind: kind.name(), svg: picture.svg()?, caption })
    };
    let figures: CommandResult<Vec<PageFigure>> = figures.into_iter().map(page_figure).collect();
    json_value(&figures?)
}

fn json_value(value: &impl Serialize) -> CommandResult<Value> {
    serde_json::to_value(value).map_err(|error| {
        Failure::failed(vec![Problem::new("", format!("the answer is not JSON: {error}"))])
    })
}
