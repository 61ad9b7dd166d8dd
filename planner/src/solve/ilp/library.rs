//! The integer programming libraries, behind one function.

use std::time::Duration;

use good_lp::solvers::{SolutionStatus, WithInitialSolution};
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution, SolverModel, Variable, WithMipGap,
    WithTimeLimit, variable,
};

use crate::solve::outcome::SolveError;

/// A minimisation over integer variables from zero to an upper bound.
#[derive(Clone, Debug, Default)]
pub struct LinearProgram {
    /// Cost of each variable.
    pub costs: Vec<f64>,
    /// Upper bound of each variable.
    pub upper_bounds: Vec<f64>,
    /// The constraints.
    pub rows: Vec<LinearRow>,
}

/// `Σ coefficient·x ≤ rhs`, or `=`.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearRow {
    /// Variables with their coefficients.
    pub terms: Vec<(usize, f64)>,
    /// Whether the row is an equality.
    pub is_equality: bool,
    /// Right-hand side.
    pub rhs: f64,
}

/// Magnitude of objectives after scaling: libraries compare with absolute tolerances of about 1e-9, and choices
/// much slower than the optimum should not need more than fifteen digits.
pub const TIME_SCALE: f64 = 100.0;

/// The unit that brings a limit of bytes near one: a power of two, so that the scaling itself is exact.
pub fn bytes_unit(limit: u64) -> f64 {
    (limit as f64).max(1.0).log2().floor().exp2()
}

/// A library for integer programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IlpLibrary {
    /// microlp: pure Rust.
    MicroLp,
    /// HiGHS: slower on small programs, much faster on hard ones. Needs the feature `highs`.
    #[cfg(feature = "highs")]
    Highs,
}

/// A program with its limits.
pub struct IlpRequest<'a> {
    /// The program.
    pub program: &'a LinearProgram,
    /// Values of all variables to start from.
    pub start: Option<Vec<f64>>,
    /// Time left.
    pub time_left: Option<Duration>,
    /// Sufficient relative gap.
    pub gap: f64,
}

/// What a library answers.
pub enum IlpAnswer {
    /// A solution.
    Solved {
        /// Values of all variables.
        values: Vec<f64>,
        /// Lower bound on the objective.
        bound: f64,
        /// How the library ended.
        end: IlpTermination,
    },
    /// The time ran out before a solution was found.
    NoSolution,
    /// It is proven that there is no solution.
    Infeasible,
}

/// How a library ended with a solution.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IlpTermination {
    /// The solution is proven optimal.
    Optimal,
    /// The gap is within the limit.
    Gap,
    /// The time ran out.
    Time,
}

impl IlpLibrary {
    /// The library in use: HiGHS where it is compiled in.
    pub const IN_USE: IlpLibrary = {
        #[cfg(feature = "highs")]
        {
            IlpLibrary::Highs
        }
        #[cfg(not(feature = "highs"))]
        {
            IlpLibrary::MicroLp
        }
    };

    /// Runs a program.
    ///
    /// # Errors
    /// The library failed.
    pub fn run(self, request: IlpRequest) -> Result<IlpAnswer, SolveError> {
        if request.program.costs.is_empty() {
            // Libraries differ on programs without variables.
            let holds = |row: &LinearRow| row.rhs == 0.0 || !row.is_equality && row.rhs > 0.0;
            let (values, bound, end) = (vec![], 0.0, IlpTermination::Optimal);
            return Ok(match request.program.rows.iter().all(holds) {
                true => IlpAnswer::Solved { values, bound, end },
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
                answer(solved, &variables, |solution, end| {
                    let columns = solution.into_inner();
                    let terms = columns.columns().iter().zip(&program.costs);
                    let objective: f64 = terms.map(|(x, cost)| x * cost).sum();
                    match end {
                        IlpTermination::Optimal => objective,
                        IlpTermination::Gap => objective * (1.0 - request.gap),
                        IlpTermination::Time => f64::NEG_INFINITY,
                    }
                })
            }
        }
    }
}

/// The variables and the objective.
fn state(program: &LinearProgram) -> (good_lp::variable::UnsolvedProblem, Vec<Variable>) {
    let mut problem = ProblemVariables::new();
    let integer = |upper: &f64| variable().integer().min(0).max(*upper);
    let variables: Vec<Variable> =
        program.upper_bounds.iter().map(|upper| problem.add(integer(upper))).collect();
    let mut objective = Expression::with_capacity(variables.len());
    for (&x, &cost) in variables.iter().zip(&program.costs) {
        objective.add_mul(cost, x);
    }
    (problem.minimise(objective), variables)
}

fn constrain(model: &mut impl SolverModel, program: &LinearProgram, variables: &[Variable]) {
    for row in &program.rows {
        let mut left = Expression::with_capacity(row.terms.len());
        for &(x, coefficient) in &row.terms {
            left.add_mul(coefficient, variables[x]);
        }
        model.add_constraint(if row.is_equality { left.eq(row.rhs) } else { left.leq(row.rhs) });
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
        Err(ResolutionError::Other(reason)) if ran_out_of_time(reason) => {
            return Ok(IlpAnswer::NoSolution);
        }
        Err(error) => return Err(failed(error)),
    };
    let end = match solution.status() {
        SolutionStatus::Optimal => IlpTermination::Optimal,
        SolutionStatus::GapLimit => IlpTermination::Gap,
        SolutionStatus::TimeLimit => IlpTermination::Time,
    };
    let values = variables.iter().map(|&x| solution.value(x)).collect();
    Ok(IlpAnswer::Solved { values, bound: bound(solution, end), end })
}

/// good_lp has no variant of its own for "no solution in time".
fn ran_out_of_time(reason: &str) -> bool {
    reason.starts_with("Time limit reached before") || reason == "NoSolutionFound"
}

fn failed(error: impl std::fmt::Display) -> SolveError {
    SolveError::Library(error.to_string())
}
