use super::*;
use crate::kernels::testing::{assert_close, assert_same, gradient, random, weigh, widen};

const ROWS: usize = 5;
const WIDTH: usize = 70;
const RMS: RmsNorm = RmsNorm { width: WIDTH, epsilon: 1e-5 };

/// γ⊙ρ·x of all rows, in f64.
fn naive(x: &[f64], scale: &[f64]) -> Vec<f64> {
    let width = scale.len();
    x.chunks(width)
        .flat_map(|x| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let rho = (mean + f64::from(RMS.epsilon)).powf(-0.5);
            x.iter().zip(scale).map(move |(x, scale)| x * rho * scale).collect::<Vec<_>>()
        })
        .collect()
}

struct Case {
    x: Vec<f32>,
    scale: Vec<f32>,
    dy: Vec<f32>,
}

fn case() -> Case {
    Case { x: random(1, ROWS * WIDTH), scale: random(2, WIDTH), dy: random(3, ROWS * WIDTH) }
}

impl Case {
    fn x(&self) -> MatrixView<'_> {
        MatrixView::new(&self.x, ROWS, WIDTH)
    }

    fn saved(&self) -> RmsNormSaved<'_> {
        RmsNormSaved { dy: MatrixView::new(&self.dy, ROWS, WIDTH), x: self.x(), scale: &self.scale }
    }

    fn shard(&self, at: usize, of: usize) -> RmsNormSaved<'_> {
        let (saved, width) = (self.saved(), WIDTH / of);
        RmsNormSaved {
            dy: saved.dy.column_range(at * width, width),
            x: saved.x.column_range(at * width, width),
            scale: &self.scale[at * width..][..width],
        }
    }

    /// dx and dγ by differences.
    fn gradients(&self) -> (Vec<f64>, Vec<f64>) {
        let (x, scale) = (widen(&self.x), widen(&self.scale));
        let dx = gradient(&x, |x| weigh(&naive(x, &scale), &self.dy));
        let dscale = gradient(&scale, |scale| weigh(&naive(&x, scale), &self.dy));
        (dx, dscale)
    }
}

#[test]
fn whole_and_sharded_forward() {
    let case = case();
    let wanted = naive(&widen(&case.x), &widen(&case.scale));
    for threads in [1, 2] {
        let parallel = Parallel::new(threads);
        let (mut y, mut s) = (vec![0.0; ROWS * WIDTH], vec![0.0; ROWS]);
        rms_norm_forward(
            case.x(),
            &case.scale,
            RMS,
            MatrixViewMut::new(&mut y, ROWS, WIDTH),
            &mut s,
            parallel,
        );
        assert_close(&y, &wanted, 1e-6);
        let whole = s.clone();

        let mut total = vec![0.0; ROWS];
        for at in 0..2 {
            rms_norm_statistic(case.shard(at, 2).x, &mut s, parallel);
            total.iter_mut().zip(&s).for_each(|(total, s)| *total += s);
        }
        assert_same(&total, &whole, 1e-6);
        y.fill(f32::NAN);
        for at in 0..2 {
            let shard = case.shard(at, 2);
            let y = MatrixViewMut::new(&mut y, ROWS, WIDTH).column_range(at * WIDTH / 2, WIDTH / 2);
            rms_norm_apply(shard.x, shard.scale, &total, RMS, y, parallel);
        }
        assert_close(&y, &wanted, 1e-6);
    }
}

#[test]
fn backward_is_the_derivative() {
    let case = case();
    let (dx_wanted, dscale_wanted) = case.gradients();
    let mut s = vec![0.0; ROWS];
    rms_norm_statistic(case.x(), &mut s, Parallel::SERIAL);
    for (write, before) in [(WriteMode::Replace, f32::NAN), (WriteMode::Add, 0.5)] {
        let (mut dx, mut dscale) = (vec![before; ROWS * WIDTH], vec![0.25; WIDTH]);
        let made = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, ROWS, WIDTH),
            write,
            dscale: &mut dscale,
            scratch: &mut [],
        };
        rms_norm_backward(case.saved(), &s, RMS, made, Parallel::SERIAL);
        let offset = if write == WriteMode::Add { 0.5 } else { 0.0 };
        assert_close(&dx, &dx_wanted.iter().map(|x| x + offset).collect::<Vec<_>>(), 3e-6);
        assert_close(&dscale, &dscale_wanted.iter().map(|x| x + 0.25).collect::<Vec<_>>(), 3e-6);
    }
}

#[test]
fn sync_backward_over_two_shards_is_the_whole() {
    let case = case();
    let (dx_wanted, dscale_wanted) = case.gradients();
    let (mut s, mut t, mut part) = (vec![0.0; ROWS], vec![0.0; ROWS], vec![0.0; ROWS]);
    rms_norm_statistic(case.x(), &mut s, Parallel::SERIAL);
    for at in 0..2 {
        rms_norm_backward_statistic(case.shard(at, 2), &mut part, Parallel::SERIAL);
        t.iter_mut().zip(&part).for_each(|(t, part)| *t += part);
    }
    let (mut dx, mut dscale) = (vec![0.0; ROWS * WIDTH], vec![0.0; WIDTH]);
    for (at, dscale) in dscale.chunks_exact_mut(WIDTH / 2).enumerate() {
        let dx = MatrixViewMut::new(&mut dx, ROWS, WIDTH).column_range(at * WIDTH / 2, WIDTH / 2);
        let made = RmsNormGradients { dx, write: WriteMode::Add, dscale, scratch: &mut [] };
        rms_norm_backward_apply(case.shard(at, 2), &s, &t, RMS, made, Parallel::SERIAL);
    }
    assert_close(&dx, &dx_wanted, 3e-6);
    assert_close(&dscale, &dscale_wanted, 3e-6);
}

#[test]
fn threads_change_nothing_but_rounding() {
    let (rows, width) = (301, 96);
    let (x, dy, scale) = (random(1, rows * width), random(2, rows * width), random(3, width));
    let rms = RmsNorm { width, epsilon: 1e-6 };
    let run = |threads: usize| {
        let parallel = Parallel::new(threads);
        let (mut y, mut s) = (vec![0.0; rows * width], vec![0.0; rows]);
        let (mut dx, mut dscale) = (vec![0.0; rows * width], vec![0.0; width]);
        let mut scratch = vec![f32::NAN; parallel.reduction_scratch_elements(width)];
        let x = MatrixView::new(&x, rows, width);
        rms_norm_forward(x, &scale, rms, MatrixViewMut::new(&mut y, rows, width), &mut s, parallel);
        let made = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, rows, width),
            write: WriteMode::Replace,
            dscale: &mut dscale,
            scratch: &mut scratch,
        };
        let saved = RmsNormSaved { dy: MatrixView::new(&dy, rows, width), x, scale: &scale };
        rms_norm_backward(saved, &s, rms, made, parallel);
        (y, s, dx, dscale)
    };
    let one = run(1);
    for threads in [2, 3] {
        let many = run(threads);
        assert_eq!((&many.0, &many.1, &many.2), (&one.0, &one.1, &one.2));
        assert_same(&many.3, &one.3, 1e-6);
    }
}
