//! `narrows plot`: draws the metrics of training runs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use crate::args::{PlotArgs, at_most_one_stdin};
use crate::errors::{CommandResult, Failure, Problem};
use crate::metrics_file::{self, MetricsLine};
use crate::output;
use crate::plot::{RUNS_MAX, TrainingCurves, check_picture_file, training_picture};

/// Draws the picture.
pub fn run(args: &PlotArgs) -> CommandResult<()> {
    let PlotArgs { metrics, output } = args;
    if output::is_stdout(output.as_os_str()) {
        let problem = Problem::new("--output", "a picture does not go to standard output");
        return Err(Failure::input(problem.hint("a file such as runs.svg")));
    }
    check_picture_file("--output", output)?;
    at_most_one_stdin(metrics)?;
    if metrics.len() > RUNS_MAX {
        let message = format!("{} runs are too many for one picture", metrics.len());
        let problem = Problem::new("METRICS", message);
        return Err(Failure::input(problem.hint(format!("at most {RUNS_MAX} files"))));
    }
    let mut curves = metrics.iter().map(|file| curves(file)).collect::<CommandResult<Vec<_>>>()?;
    shorten_names(&mut curves);
    let Some(picture) = training_picture(&curves) else {
        let names: Vec<&str> = curves.iter().map(|curves| curves.name.as_str()).collect();
        return Err(Failure::input(Problem::new(names.join(", "), "has no steps")));
    };
    picture.write(output)
}

fn curves(file: &OsStr) -> CommandResult<TrainingCurves> {
    let (name, lines) = metrics_file::read(file)?;
    let curve = |value: fn(&MetricsLine) -> Option<f64>| {
        lines.iter().filter_map(|line| Some((line.step as f64, value(line)?))).collect()
    };
    Ok(TrainingCurves {
        name,
        loss: curve(|line| line.loss),
        eval_loss: curve(|line| line.eval_loss),
        gradient_norm: curve(|line| line.grad_norm),
        learning_rate: curve(|line| Some(1e3 * line.learning_rate?)),
        step_time: curve(|line| line.step_time_s),
        predicted_step_time: curve(|line| line.predicted_step_time_s),
    })
}

/// Leaves the folders out of the names where the names of the files differ.
fn shorten_names(curves: &mut [TrainingCurves]) {
    let file_name = |curves: &TrainingCurves| {
        let name = Path::new(&curves.name).file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    };
    let names: Vec<String> = curves.iter().map(file_name).collect();
    if names.iter().collect::<BTreeSet<_>>().len() == names.len() {
        curves.iter_mut().zip(names).for_each(|(curves, name)| curves.name = name);
    }
}
