use super::*;
use crate::kernels::testing::{
    assert_close, assert_close_f32, finite_difference, random, weighted_sum, widen,
};

const ROWS: usize = 5;
const WIDTH: usize = 70;
const RMS: RmsNorm = RmsNorm { width: WIDTH, epsilon: 1e-5 };

/// γ⊙ρ·x of all rows, by definition in f64.
fn reference(x: &[f64], scale: &[f64]) -> Vec<f64> {
    let width = scale.len();
    x.chunks(width)
        .flat_map(|x| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let rho = (mean + f64::from(RMS.epsilon)).powf(-0.5);
            x.iter().zip(scale).map(move |(x, scale)| x * rho * scale).collect::<Vec<_>>()
        })
        .collect()
}

struct RmsNormCase {
    x: Vec<f32>,
    scale: Vec<f32>,
    dy: Vec<f32>,
}

fn case() -> RmsNormCase {
    RmsNormCase { x: random(1, ROWS * WIDTH), scale: random(2, WIDTH), dy: random(3, ROWS * WIDTH) }
}

impl RmsNormCase {
    fn x(&self) -> MatrixView<'_> {
        MatrixView::new(&self.x, ROWS, WIDTH)
    }

    fn saved(&self) -> RmsNormSaved<'_> {
        RmsNormSaved { dy: MatrixView::new(&self.dy, ROWS, WIDTH), x: self.x(), scale: &self.scale }
    }

    fn shard(&self, index: usize, shards: usize) -> RmsNormSaved<'_> {
        let (saved, width) = (self.saved(), WIDTH / shards);
        RmsNormSaved {
            dy: saved.dy.column_range(index * width, width),
            x: saved.x.column_range(index * width, width),
            scale: &self.scale[index * width..][..width],
        }
    }

    /// dx and dγ by finite differences.
    fn expected_gradients(&self) -> (Vec<f64>, Vec<f64>) {
        let (x, scale) = (widen(&self.x), widen(&self.scale));
        let dx = finite_difference(&x, |x| weighted_sum(&reference(x, &scale), &self.dy));
        let dscale =
            finite_difference(&scale, |scale| weighted_sum(&reference(&x, scale), &self.dy));
        (dx, dscale)
    }
}

#[test]
fn forward_is_the_definition_whole_and_sharded() {
    let case = case();
    let expected = reference(&widen(&case.x), &widen(&case.scale));
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
        assert_close(&y, &expected, 1e-6);
        let whole = s.clone();

        let mut total = vec![0.0; ROWS];
        for index in 0..2 {
            rms_norm_statistic(case.shard(index, 2).x, &mut s, parallel);
            total.iter_mut().zip(&s).for_each(|(total, s)| *total += s);
        }
        assert_close_f32(&total, &whole, 1e-6);
        y.fill(f32::NAN);
        for index in 0..2 {
            let shard = case.shard(index, 2);
            let y =
                MatrixViewMut::new(&mut y, ROWS, WIDTH).column_range(index * WIDTH / 2, WIDTH / 2);
            rms_norm_apply(shard.x, shard.scale, &total, RMS, y, parallel);
        }
        assert_close(&y, &expected, 1e-6);
    }
}

#[test]
fn backward_is_the_derivative() {
    let case = case();
    let (expected_dx, expected_dscale) = case.expected_gradients();
    let mut s = vec![0.0; ROWS];
    rms_norm_statistic(case.x(), &mut s, Parallel::SERIAL);
    for (write, initial) in [(WriteMode::Replace, f32::NAN), (WriteMode::Add, 0.5)] {
        let (mut dx, mut dscale) = (vec![initial; ROWS * WIDTH], vec![0.25; WIDTH]);
        let gradients = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, ROWS, WIDTH),
            write,
            dscale: &mut dscale,
            scratch: &mut [],
        };
        rms_norm_backward(case.saved(), &s, RMS, gradients, Parallel::SERIAL);
        let offset = if write == WriteMode::Add { 0.5 } else { 0.0 };
        assert_close(&dx, &expected_dx.iter().map(|x| x + offset).collect::<Vec<_>>(), 3e-6);
        assert_close(&dscale, &expected_dscale.iter().map(|x| x + 0.25).collect::<Vec<_>>(), 3e-6);
    }
}

#[test]
fn sync_backward_over_two_shards_is_that_of_the_whole() {
    let case = case();
    let (expected_dx, expected_dscale) = case.expected_gradients();
    let (mut s, mut t, mut partial) = (vec![0.0; ROWS], vec![0.0; ROWS], vec![0.0; ROWS]);
    rms_norm_statistic(case.x(), &mut s, Parallel::SERIAL);
    for index in 0..2 {
        rms_norm_backward_statistic(case.shard(index, 2), &mut partial, Parallel::SERIAL);
        t.iter_mut().zip(&partial).for_each(|(t, partial)| *t += partial);
    }
    let (mut dx, mut dscale) = (vec![0.0; ROWS * WIDTH], vec![0.0; WIDTH]);
    for (index, dscale) in dscale.chunks_exact_mut(WIDTH / 2).enumerate() {
        let dx =
            MatrixViewMut::new(&mut dx, ROWS, WIDTH).column_range(index * WIDTH / 2, WIDTH / 2);
        let gradients = RmsNormGradients { dx, write: WriteMode::Add, dscale, scratch: &mut [] };
        rms_norm_backward_apply(case.shard(index, 2), &s, &t, RMS, gradients, Parallel::SERIAL);
    }
    assert_close(&dx, &expected_dx, 3e-6);
    assert_close(&dscale, &expected_dscale, 3e-6);
}

#[test]
fn threads_only_change_the_rounding_of_dscale() {
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
        let gradients = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, rows, width),
            write: WriteMode::Replace,
            dscale: &mut dscale,
            scratch: &mut scratch,
        };
        let saved = RmsNormSaved { dy: MatrixView::new(&dy, rows, width), x, scale: &scale };
        rms_norm_backward(saved, &s, rms, gradients, parallel);
        (y, s, dx, dscale)
    };
    let one = run(1);
    for threads in [2, 3] {
        let many = run(threads);
        assert_eq!((&many.0, &many.1, &many.2), (&one.0, &one.1, &one.2));
        assert_close_f32(&many.3, &one.3, 1e-6);
    }
}
