//! The linear programming library: integer programs by microlp through good_lp, and relaxations, which gain rows, by microlp itself.

use std::time::{Duration, Instant};

use good_lp::solvers::microlp::MicroLpProblem;
use good_lp::solvers::{SolutionStatus, WithInitialSolution};
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution, SolverModel, Variable, WithMipGap,
    WithTimeLimit, variable,
};

use crate::solve::SolveError;

/// A minimisation over integer variables from zero to an upper bound.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinearProgram {
    /// Cost of each variable.
    pub costs: Vec<f64>,
    /// Upper bound of each variable.
    pub upper_bounds: Vec<f64>,
    /// The constraints.
    pub rows: Vec<LinearRow>,
}

impl LinearProgram {
    /// The dual of the relaxation, as a minimisation: its variables are the multipliers of the rows, then those of the upper bounds.
    /// Multipliers of equalities must not be negative at the optimum.
    pub(crate) fn dual(&self) -> LinearProgram {
        let (rows, variables) = (self.rows.len(), self.costs.len());
        let row = |at: usize| LinearRow {
            terms: vec![(rows + at, -1.0)],
            is_equality: false,
            rhs: self.costs[at],
        };
        let mut dual = LinearProgram {
            costs: self.rows.iter().map(|row| row.rhs).chain(self.upper_bounds.clone()).collect(),
            upper_bounds: vec![f64::INFINITY; rows + variables],
            rows: (0..variables).map(row).collect(),
        };
        for (at, row) in self.rows.iter().enumerate() {
            for (variable, coefficient) in &row.terms {
                dual.rows[*variable].terms.push((at, -coefficient));
            }
        }
        dual
    }
}

/// `Σ coefficient·x ≤ rhs`, or `=`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinearRow {
    /// Variables, each of them once, with their coefficients.
    pub terms: Vec<(usize, f64)>,
    /// Whether the row is an equality.
    pub is_equality: bool,
    /// Right-hand side.
    pub rhs: f64,
}

/// Magnitude of objectives after scaling: the library compares with absolute tolerances of about 1e-9, and choices
/// much slower than the optimum should not need more than fifteen digits.
pub(crate) const TIME_SCALE: f64 = 100.0;

/// The unit that brings a limit of bytes near one: a power of two, so that the scaling itself is exact.
pub(crate) fn bytes_unit(limit: u64) -> f64 {
    (limit as f64).max(1.0).log2().floor().exp2()
}

/// A program with its limits.
pub(crate) struct IlpRequest<'a> {
    /// The program.
    pub program: &'a LinearProgram,
    /// Values of all variables to start from.
    pub start: Option<Vec<f64>>,
    /// Wall time; unlimited when absent.
    pub time_limit: Option<Duration>,
    /// Sufficient relative gap.
    pub gap: f64,
}

/// Answer of the library.
pub(crate) enum IlpAnswer {
    /// A solution.
    Solved {
        /// Values of all variables.
        values: Vec<f64>,
        /// Lower bound on the objective.
        bound: f64,
        /// Termination of the library.
        termination: IlpTermination,
    },
    /// The time ran out before a solution was found.
    NoSolution,
    /// No solution exists, by proof.
    Infeasible,
}

/// Termination of the library with a solution.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum IlpTermination {
    /// The solution is proven optimal.
    Optimal,
    /// The gap is within the limit.
    Gap,
    /// The time ran out.
    Time,
}

/// Solves an integer program.
///
/// # Errors
/// The library failed.
pub(crate) fn solve_program(request: IlpRequest) -> Result<IlpAnswer, SolveError> {
    let started = Instant::now();
    let program = request.program;
    if program.costs.is_empty() {
        // Libraries differ on programs without variables.
        let holds = |row: &LinearRow| row.rhs == 0.0 || !row.is_equality && row.rhs > 0.0;
        let (values, bound, termination) = (vec![], 0.0, IlpTermination::Optimal);
        return Ok(match program.rows.iter().all(holds) {
            true => IlpAnswer::Solved { values, bound, termination },
            false => IlpAnswer::Infeasible,
        });
    }
    let (mut model, variables) = build(program);
    if let Some(start) = request.start {
        model = model.with_initial_solution(variables.iter().copied().zip(start));
    }
    if let Some(limit) = request.time_limit {
        model = model.with_time_limit(limit.as_secs_f64());
    }
    // Conversion to f32 rounds to nearest; it must not widen the gap.
    let gap = (request.gap * (1.0 - 1e-6)) as f32;
    let solution = match model.with_mip_gap(gap).map_err(failure)?.solve() {
        Ok(solution) => solution,
        Err(ResolutionError::Infeasible) => return Ok(IlpAnswer::Infeasible),
        // good_lp reports "no solution in time" as `Other`, like failures: the clock tells them apart.
        Err(ResolutionError::Other(_))
            if request.time_limit.is_some_and(|limit| started.elapsed() >= limit) =>
        {
            return Ok(IlpAnswer::NoSolution);
        }
        Err(error) => return Err(failure(error)),
    };
    let termination = match solution.status() {
        SolutionStatus::Optimal => IlpTermination::Optimal,
        SolutionStatus::GapLimit => IlpTermination::Gap,
        SolutionStatus::TimeLimit => IlpTermination::Time,
    };
    let values = variables.iter().map(|&x| solution.value(x)).collect();
    let bound = solution.into_inner().stats().best_bound.unwrap_or(f64::NEG_INFINITY);
    Ok(IlpAnswer::Solved { values, bound, termination })
}

/// The values of all variables of a program's relaxation, which may be fractions; `None` without a solution, or where the library
/// fails.
pub(crate) fn solve_relaxation(program: &LinearProgram) -> Option<Vec<f64>> {
    Some(Relaxation::solve(program)?.values())
}

/// A solved relaxation, whose variables may be fractions. Rows can be added, and the solution is then the start of the next one.
pub(crate) struct Relaxation {
    variables: Vec<microlp::Variable>,
    solution: microlp::Solution,
}

impl Relaxation {
    /// Solves the relaxation of a program; `None` without a solution, or where the library fails.
    pub(crate) fn solve(program: &LinearProgram) -> Option<Relaxation> {
        let mut problem = microlp::Problem::new(microlp::OptimizationDirection::Minimize);
        let all = program.costs.iter().zip(&program.upper_bounds);
        let variables: Vec<_> =
            all.map(|(cost, upper)| problem.add_var(*cost, (0.0, *upper))).collect();
        for row in &program.rows {
            let (terms, comparison) = of_library(row, &variables);
            problem.add_constraint(terms, comparison, row.rhs);
        }
        let solution = problem.solve().ok()?.into_solution().ok()?;
        Some(Relaxation { variables, solution })
    }

    /// Adds a row; `None` without a solution, or where the library fails.
    pub(crate) fn with_row(self, row: &LinearRow) -> Option<Relaxation> {
        let Relaxation { variables, solution } = self;
        let (terms, comparison) = of_library(row, &variables);
        let outcome = solution.add_constraint(terms, comparison, row.rhs).ok()?;
        Some(Relaxation { variables, solution: outcome.into_solution().ok()? })
    }

    /// The values of all variables.
    pub(crate) fn values(&self) -> Vec<f64> {
        self.variables.iter().map(|&variable| self.solution.var_value(variable)).collect()
    }
}

/// The terms of a row, and how the library compares them with its right-hand side.
fn of_library(
    row: &LinearRow,
    variables: &[microlp::Variable],
) -> (microlp::LinearExpr, microlp::ComparisonOp) {
    let mut terms = microlp::LinearExpr::empty();
    for &(variable, coefficient) in &row.terms {
        terms.add(variables[variable], coefficient);
    }
    let comparison = match row.is_equality {
        true => microlp::ComparisonOp::Eq,
        false => microlp::ComparisonOp::Le,
    };
    (terms, comparison)
}

/// The library's model of a program in integers.
fn build(program: &LinearProgram) -> (MicroLpProblem, Vec<Variable>) {
    let mut problem = ProblemVariables::new();
    let mut add = |upper: &f64| problem.add(variable().integer().min(0).max(*upper));
    let variables: Vec<Variable> = program.upper_bounds.iter().map(&mut add).collect();
    let mut objective = Expression::with_capacity(variables.len());
    for (&x, &cost) in variables.iter().zip(&program.costs) {
        objective.add_mul(cost, x);
    }
    let mut model = problem.minimise(objective).using(good_lp::microlp);
    for row in &program.rows {
        let mut sum = Expression::with_capacity(row.terms.len());
        for &(x, coefficient) in &row.terms {
            sum.add_mul(coefficient, variables[x]);
        }
        model.add_constraint(if row.is_equality { sum.eq(row.rhs) } else { sum.leq(row.rhs) });
    }
    (model, variables)
}

fn failure(error: impl std::fmt::Display) -> SolveError {
    SolveError::Library(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_of_zero_ends_without_a_solution() {
        // A knapsack: max Σ (i + 7)·x_i, with weights that leave a fractional relaxation.
        let variables = 0..40;
        let program = LinearProgram {
            costs: variables.clone().map(|i| -f64::from(i + 7)).collect(),
            upper_bounds: vec![1.0; 40],
            rows: vec![LinearRow {
                terms: variables.map(|i| (i as usize, f64::from(3 * i + 11))).collect(),
                is_equality: false,
                rhs: 997.0,
            }],
        };
        let time_limit = Some(Duration::ZERO);
        let request = IlpRequest { program: &program, start: None, time_limit, gap: 0.0 };
        let answer = solve_program(request);
        assert!(matches!(answer, Ok(IlpAnswer::NoSolution)));
    }
}
