//! Draws `docs/step-times.svg`: the published baselines and the fastest plan, from 1B to 30B.
//!
//! ```sh
//! cargo run --release --example figure -- docs/step-times.svg
//! ```
//!
//! The meshes are the published ones. A microbatch has four sequences of 4,096 tokens; a step has
//! one for each pipeline stage.

use std::error::Error;
use std::path::PathBuf;

use narrows_cost_model::{Breakdown, profile};
use narrows_plan::Defects;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Baseline, Rules};
use narrows_planner::{Request, predict, search};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, register_font};

type Result<T> = std::result::Result<T, Box<dyn Error>>;
type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Size, devices along the tensor axis, pipeline stages.
const MESHES: [(&str, u64, u64); 5] =
    [("1b", 1, 1), ("3b", 2, 1), ("7b", 4, 1), ("13b", 4, 2), ("30b", 4, 4)];

/// Label, family of the model, part of the space.
const BARS: [(&str, &str, Baseline); 6] = [
    ("full rank, FullRank-TP", "llama", Baseline::FullrankTp),
    ("full rank, Megatron SP", "llama", Baseline::MegatronSp),
    ("Vanilla-TP as published", "cola", Baseline::VanillaTpPublished),
    ("Vanilla-TP", "cola", Baseline::VanillaTp),
    ("BTP", "cola", Baseline::Btp),
    ("fastest plan", "cola", Baseline::Auto),
];

const MICRO_BATCH: u64 = 4;
const SEQUENCE_LENGTH: u64 = 4096;

type Part = (&'static str, RGBColor, fn(&Breakdown) -> f64);

/// From the bottom of a bar to its top.
const PARTS: [Part; 7] = [
    ("GEMMs", RGBColor(68, 119, 170), |b| b.gemm),
    ("attention", RGBColor(102, 204, 238), |b| b.attention),
    ("fused ops", RGBColor(34, 136, 51), |b| b.elementwise),
    ("optimizer", RGBColor(150, 150, 150), |b| b.optimizer),
    ("collectives", RGBColor(238, 102, 119), |b| b.collective_exposed),
    ("transfers", RGBColor(170, 51, 119), |b| b.other),
    ("bubble", RGBColor(225, 215, 160), |b| b.bubble),
];

fn main() -> Result<()> {
    let target = std::env::args_os().nth(1).unwrap_or_else(|| "docs/step-times.svg".into());
    for style in [FontStyle::Normal, FontStyle::Bold] {
        register_font("sans-serif", style, dejavu::sans::regular())
            .map_err(|_| "the font cannot be read")?;
    }
    let panels: Vec<Panel> = MESHES.iter().map(|mesh| Panel::plan(*mesh)).collect::<Result<_>>()?;
    draw(&PathBuf::from(target), &panels)
}

/// The bars of one size; a bar without a plan is absent.
struct Panel {
    title: String,
    bars: Vec<(&'static str, Option<Breakdown>)>,
}

impl Panel {
    fn plan((size, tensor, pipeline): (&str, u64, u64)) -> Result<Panel> {
        let mut bars = vec![];
        for (label, family, baseline) in BARS {
            let request = request(&format!("{family}-{size}"), tensor, pipeline, baseline)?;
            request.validate()?;
            let breakdown = match search(&request).best {
                None => None,
                Some(best) => {
                    let Request { model, profile, executor, .. } = &request;
                    let (prediction, _) = predict(model, profile, *executor, &best.plan)?;
                    Some(prediction.breakdown_s)
                }
            };
            bars.push((label, breakdown));
        }
        let plural = if tensor * pipeline == 1 { "" } else { "s" };
        let devices = tensor * pipeline;
        let title =
            format!("{}: {devices} device{plural}, T{tensor} P{pipeline}", size.to_uppercase());
        Ok(Panel { title, bars })
    }
}

fn request(model: &str, tensor: u64, pipeline: u64, baseline: Baseline) -> Result<Request> {
    Ok(Request {
        micro_batch: Some(MICRO_BATCH),
        tensor: Some(tensor),
        pipeline: Some(pipeline),
        data: Some(1),
        rules: Rules { baseline, ..Rules::ALL },
        ..Request::new(
            presets::find(model).map_err(Defects::from)?,
            profile::preset("a100-80gb")?,
            tensor * pipeline,
            MICRO_BATCH * pipeline,
            SEQUENCE_LENGTH,
        )
    })
}

const WIDTH: u32 = 1180;
const HEIGHT: u32 = 480;
const BAR_TOP: i32 = 70;
const BAR_BOTTOM: i32 = 290;

fn draw(target: &std::path::Path, panels: &[Panel]) -> Result<()> {
    let canvas = SVGBackend::new(target, (WIDTH, HEIGHT)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let (body, legend) = canvas.split_vertically(HEIGHT - 40);
    for (panel, area) in panels.iter().zip(body.split_evenly((1, panels.len()))) {
        draw_panel(panel, &area)?;
    }
    draw_legend(&legend)?;
    canvas.present()?;
    Ok(())
}

fn draw_panel(panel: &Panel, area: &Canvas) -> Result<()> {
    let ink = RGBColor(40, 40, 40);
    let centred = Pos::new(HPos::Center, VPos::Bottom);
    let middle = area.dim_in_pixel().0 as i32 / 2;
    let title = ("sans-serif", 14).into_font().color(&ink).pos(centred);
    area.draw(&Text::new(panel.title.clone(), (middle, 36), title))?;
    let step = area.dim_in_pixel().0 as i32 / (panel.bars.len() as i32 + 1);
    let totals = panel.bars.iter().filter_map(|(_, bar)| bar.as_ref().map(Breakdown::total));
    let scale = f64::from(BAR_BOTTOM - BAR_TOP) / totals.fold(f64::MIN_POSITIVE, f64::max);
    for (index, (label, bar)) in panel.bars.iter().enumerate() {
        let left = step / 2 + index as i32 * step + 4;
        let centre = left + step / 2 - 4;
        let mut below = 0.0;
        if let Some(breakdown) = bar {
            for (_, colour, part) in PARTS {
                let above = below + part(breakdown) * scale;
                let corners = [
                    (left, BAR_BOTTOM - below.round() as i32),
                    (left + step - 8, BAR_BOTTOM - above.round() as i32),
                ];
                area.draw(&Rectangle::new(corners, colour.filled()))?;
                below = above;
            }
        }
        let total = bar.as_ref().map_or("none fits".into(), |b| format!("{:.2} s", b.total()));
        let font = ("sans-serif", 11).into_font().color(&ink).pos(centred);
        area.draw(&Text::new(total, (centre, BAR_BOTTOM - 4 - below.round() as i32), font))?;
        let upwards = ("sans-serif", 12).into_font().transform(FontTransform::Rotate270);
        let upwards = upwards.color(&ink).pos(Pos::new(HPos::Right, VPos::Center));
        area.draw(&Text::new(*label, (centre, BAR_BOTTOM + 8), upwards))?;
    }
    Ok(())
}

fn draw_legend(area: &Canvas) -> Result<()> {
    let ink = RGBColor(40, 40, 40);
    let font = ("sans-serif", 13).into_font().color(&ink).pos(Pos::new(HPos::Left, VPos::Center));
    for (index, (name, colour, _)) in PARTS.iter().enumerate() {
        let left = 60 + index as i32 * 155;
        area.draw(&Rectangle::new([(left, 8), (left + 14, 22)], colour.filled()))?;
        area.draw(&Text::new(*name, (left + 20, 15), font.clone()))?;
    }
    Ok(())
}
