//! `narrows plot`: draws the metrics of training runs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

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

/// Shortens the names to the ends of the paths that tell the files apart: the names of the files, with as many of their folders as
/// are needed. A path that has no such end stays whole.
fn shorten_names(curves: &mut [TrainingCurves]) {
    let names: Vec<String> = curves.iter().map(|curves| curves.name.clone()).collect();
    for (index, curves) in curves.iter_mut().enumerate() {
        let parts: Vec<_> = Path::new(&names[index]).components().collect();
        let mut ends =
            (0..parts.len()).rev().map(|first| parts[first..].iter().collect::<PathBuf>());
        let is_unique =
            |end: &PathBuf| names.iter().filter(|name| Path::new(name).ends_with(end)).count() == 1;
        if let Some(end) = ends.find(is_unique) {
            curves.name = end.display().to_string();
        }
    }
}
