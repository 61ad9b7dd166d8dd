//! The libraries that solve a [`IntegerProgram`], behind one function.

use std::time::Duration;

use good_lp::solvers::{SolutionStatus, WithInitialSolution};
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution, SolverModel, Variable, WithMipGap,
    WithTimeLimit, variable,
};

use super::program::{IntegerProgram, LinearRow};
use crate::solve::SolveError;

/// A library for integer programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IlpLibrary {
    /// microlp: pure Rust, always there.
    MicroLp,
    /// HiGHS: slower on small programs, much faster on hard ones.
    #[cfg(feature = "highs")]
    Highs,
}

/// What a library is asked for.
pub(super) struct IlpRequest<'a> {
    pub program: &'a IntegerProgram,
    /// Values of all variables to start from.
    pub start: Option<Vec<f64>>,
    pub time_left: Option<Duration>,
    pub gap: f64,
}

/// What a library answers.
pub(super) enum IlpAnswer {
    Solved {
        values: Vec<f64>,
        /// No solution has a smaller objective.
        bound: f64,
        ended: IlpTermination,
    },
    /// The time ran out before any solution was found.
    Nothing,
    Infeasible,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum IlpTermination {
    Proven,
    Gap,
    Time,
}

impl IlpLibrary {
    pub(super) fn run(self, request: IlpRequest) -> Result<IlpAnswer, SolveError> {
        if request.program.costs.is_empty() {
            // Libraries differ on programs without variables.
            let holds = |row: &LinearRow| row.rhs == 0.0 || !row.equal && row.rhs > 0.0;
            return Ok(match request.program.rows.iter().all(holds) {
                true => IlpAnswer::Solved {
                    values: Vec::new(),
                    bound: 0.0,
                    ended: IlpTermination::Proven,
                },
                false => IlpAnswer::Infeasible,
            });
        }
        // Conversion to f32 rounds to nearest; it must not widen the gap.
        let gap = (request.gap * (1.0 - 1e-6)) as f32;
        let time_left = request.time_left.map(|left| left.as_secs_f64());
        let (problem, variables) = state(request.program);
        match self {
            IlpLibrary::MicroLp => {
                let mut model = problem.using(good_lp::microlp);
                constrain(&mut model, request.program, &variables);
                if let Some(start) = request.start {
                    model = model.with_initial_solution(variables.iter().copied().zip(start));
                }
                if let Some(seconds) = time_left {
                    model = model.with_time_limit(seconds);
                }
                let solved = model.with_mip_gap(gap).map_err(failed)?.solve();
                answer(solved, &variables, |solution, _| {
                    solution.into_inner().stats().best_bound.unwrap_or(f64::NEG_INFINITY)
                })
            }
            #[cfg(feature = "highs")]
            IlpLibrary::Highs => {
                let mut model = problem.using(good_lp::highs);
                constrain(&mut model, request.program, &variables);
                if let Some(start) = request.start {
                    model = model.with_initial_solution(variables.iter().copied().zip(start));
                }
                if let Some(seconds) = time_left {
                    model = model.with_time_limit(seconds);
                }
                // By default HiGHS stops at an absolute gap of 1e-6.
                let model = model.set_mip_abs_gap(0.0).map_err(failed)?;
                let solved = model.with_mip_gap(gap).map_err(failed)?.solve();
                let program = request.program;
                answer(solved, &variables, |solution, ended| {
                    let columns = solution.into_inner();
                    let terms = columns.columns().iter().zip(&program.costs);
                    let objective: f64 = terms.map(|(x, cost)| x * cost).sum();
                    match ended {
                        IlpTermination::Proven => objective,
                        IlpTermination::Gap => objective * (1.0 - request.gap),
                        IlpTermination::Time => f64::NEG_INFINITY,
                    }
                })
            }
        }
    }
}

/// The variables and the objective.
fn state(program: &IntegerProgram) -> (good_lp::variable::UnsolvedProblem, Vec<Variable>) {
    let mut problem = ProblemVariables::new();
    let variables = problem.add_vector(variable().binary(), program.costs.len());
    let mut objective = Expression::with_capacity(variables.len());
    for (&x, &cost) in variables.iter().zip(&program.costs) {
        objective.add_mul(cost, x);
    }
    (problem.minimise(objective), variables)
}

fn constrain(model: &mut impl SolverModel, program: &IntegerProgram, variables: &[Variable]) {
    for row in &program.rows {
        let mut left = Expression::with_capacity(row.terms.len());
        for &(x, coefficient) in &row.terms {
            left.add_mul(coefficient, variables[x]);
        }
        model.add_constraint(if row.equal { left.eq(row.rhs) } else { left.leq(row.rhs) });
    }
}

fn answer<S: Solution>(
    solved: Result<S, ResolutionError>,
    variables: &[Variable],
    bound: impl FnOnce(S, IlpTermination) -> f64,
) -> Result<IlpAnswer, SolveError> {
    let solution = match solved {
        Ok(solution) => solution,
        Err(ResolutionError::Infeasible) => return Ok(IlpAnswer::Infeasible),
        Err(ResolutionError::Other(reason)) if ran_out(reason) => return Ok(IlpAnswer::Nothing),
        Err(error) => return Err(failed(error)),
    };
    let ended = match solution.status() {
        SolutionStatus::Optimal => IlpTermination::Proven,
        SolutionStatus::GapLimit => IlpTermination::Gap,
        SolutionStatus::TimeLimit => IlpTermination::Time,
    };
    let values = variables.iter().map(|&x| solution.value(x)).collect();
    Ok(IlpAnswer::Solved { values, bound: bound(solution, ended), ended })
}

/// good_lp has no variant of its own for "no solution in time".
fn ran_out(reason: &str) -> bool {
    reason.starts_with("Time limit reached before") || reason == "NoSolutionFound"
}

fn failed(error: impl std::fmt::Display) -> SolveError {
    SolveError::Backend(error.to_string())
}
